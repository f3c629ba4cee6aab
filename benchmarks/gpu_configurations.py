"""What ``verify_gpu`` runs: recurrences, head sizes, dtypes, and the cases that each of them meets.

Sizes for each tile that the table of tiles has, filled exactly and in part. Of the delta family, DeltaNet, gated
DeltaNet and KDA meet every tile; every other combination of gate, direction, counts and blocks runs the same kernels
and meets some.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from statemix.harness.recurrences import NamedRecurrence

from .against_float64 import Case
from .ops import OPS

# (key_dim, value_dim): widths 16 to 512 that the tiles of K are padded to, with widths 16, 32 and 64 of V, or several
# blocks of 64. Of the sizes in a line the first fills its tiles exactly and the second does not.
PAIRS = (
    ((16, 16), (4, 12)),
    ((16, 32), (12, 24)),
    ((16, 64), (8, 100)),
    ((32, 16), (20, 4)),
    ((32, 32), (24, 20)),
    ((32, 128), (20, 40)),
    ((64, 16), (40, 12)),
    ((64, 32), (48, 24)),
    ((64, 64), (40, 72)),
    ((128, 16), (100, 8)),
    ((128, 32), (72, 20)),
    ((128, 128), (100, 40)),
    ((256, 16), (160, 12)),
    ((256, 32), (200, 24)),
    ((256, 256), (160, 320)),
    ((512, 16), (320, 4)),
    ((512, 32), (260, 20)),
    ((512, 512), (320, 100)),
)

# Cases of one line share most compiled kernels; the lines differ in what is absent (states, offsets, saved tensors).
CASES: dict[str, tuple[Case, ...]] = {
    "batch": (
        Case("t1", 2, 1),
        Case("t17 strong", 2, 17, gates="strong"),
        Case("t64 zero", 2, 64, gates="zero"),
        Case("t65 scaled", 3, 65, scale=0.3),
        Case("t200 resets", 2, 200, gates="resets"),
        Case("t200 mixed", 1, 200, gates="mixed"),
        Case("t65 strided", 2, 65, is_strided=True),
    ),
    "long": (Case("t1000 segments", 1, 1000), Case("t1000 whole", 1, 1000, gates="mixed")),
    "packed": (
        Case("t200 packed", 1, 200, offsets=(0, 0, 5, 70, 134, 134, 180)),
        Case("t1000 packed", 1, 1000, offsets=(0, 10, 10, 37, 700, 700, 999), gates="mixed"),
    ),
    "stateless": (Case("t65 stateless", 2, 65, has_state=False), Case("t700 stateless", 1, 700, has_state=False)),
    "recomputed": (
        Case("t200 recomputed", 2, 200, options=(("recompute", True),)),
        Case("t1000 recomputed", 1, 1000, options=(("recompute", True),)),
    ),
    "ungrouped": (Case("t65 ungrouped", 2, 65, num_heads=3, num_value_heads=3, has_narrow_gates=True),),
    "recurrent": (
        Case("t17 recurrent", 2, 17, form="recurrent"),
        Case("t200 recurrent", 1, 200, form="recurrent", offsets=(0, 0, 5, 70, 134, 134, 180)),
    ),
}
COMMON = ((64, 64), (128, 128))  # run every case, whatever the turn
ROTATING = ("packed", "long", "stateless", "recomputed", "ungrouped", "recurrent")

# Those of the delta family. T = 700 and more is cut into segments for the few heads of most cases.
DELTA_CASES: dict[str, tuple[Case, ...]] = {
    "batch": (
        Case("t1", 2, 1),
        Case("t17 strong", 2, 17, gates="strong"),
        Case("t64 zero", 2, 64, gates="zero", rates="to two"),
        Case("t65 scaled", 3, 65, scale=0.3),
        Case("t200 resets", 2, 200, gates="resets", rates="to two"),
        Case("t200 mixed", 1, 200, gates="mixed"),
        Case("t200 equal", 1, 200, gates="zero", rates="one", has_equal_keys=True),
        Case("t200 equal two", 1, 200, gates="zero", rates="two", has_equal_keys=True),
        Case("t65 strided", 2, 65, is_strided=True),
    ),
    "long": (Case("t1000 segments", 1, 1000, rates="to two"),),
    "packed": (
        Case("t200 packed", 1, 200, offsets=(0, 0, 5, 70, 134, 134, 180), rates="to two"),
        Case("t900 packed", 1, 900, offsets=(0, 10, 10, 37, 700, 700, 899), gates="mixed"),
    ),
    "stateless": CASES["stateless"],
    "recomputed": (
        Case("t200 recomputed", 2, 200, options=(("recompute", True),)),
        Case("t700 recomputed", 1, 700, options=(("recompute", True),)),
    ),
    "ungrouped": CASES["ungrouped"],
    "recurrent": (
        Case("t17 recurrent", 2, 17, form="recurrent", rates="to two"),
        Case("t200 recurrent", 1, 200, form="recurrent", offsets=(0, 0, 5, 70, 134, 134, 180)),
    ),
}

HeadSizes = tuple[tuple[int, int], ...]

EVERY_TILE = ("deltanet", "gated_deltanet", "kda")
# (key_dim, value_dim) of the other combinations: exact ones, such that fill their tiles in part, and in blocks.
EXACT = ((64, 64), (128, 128), (256, 128))
IN_PART = ((100, 40), (40, 72), (200, 24), (20, 40), (16, 100), (320, 20))
BLOCKS_OF_64_OR_128 = ((128, 64), (256, 128))
BLOCKS_IN_PART = ((200, 40), (80, 72), (144, 20), (40, 100))
EIGHT_BLOCKS = ((512, 64), (1024, 128))  # without steps and along the write key only


@dataclass(frozen=True)
class Configuration:
    """One line: a recurrence, head sizes, a dtype and the sets of cases to run; 0 blocks for its own."""

    op: str
    key_dim: int
    value_dim: int
    dtype: str
    sets: tuple[str, ...]
    blocks: int = 0

    @property
    def recurrence(self) -> NamedRecurrence:
        return OPS[self.op].in_blocks(self.blocks) if self.blocks else OPS[self.op]

    @property
    def words(self) -> set[str]:
        return {*str(self).split(), *self.sets}

    def __str__(self) -> str:
        sets = "all" if self.sets == tuple(CASES) else "+".join(self.sets)
        blocks = f" b{self.blocks}" if self.blocks else ""
        return f"{self.op}{blocks} K{self.key_dim} V{self.value_dim} {self.dtype} {sets}"

    @property
    def cases(self) -> list[Case]:
        known = CASES if self.recurrence.kernels == "additive" else DELTA_CASES
        return [case for name in self.sets for case in known[name]]


def configurations(ops: Sequence[str], *, depth: str) -> list[Configuration]:
    """The list to run, the slowest to compile first, so that none of them comes at the end.

    "quick": for every width of K one width of V. "usual": all pairs of widths, filled exactly and in part by turns,
    with one more set of cases each by turns. "full": everything. Combinations that share their kernels run fewer.
    """
    additive, every_tile, others = (
        [op for op in ops if _share(op) == share] for share in ("additive", "every tile", "some tiles")
    )
    listed = _for_every_tile(additive, depth=depth) + _for_every_tile(every_tile, depth=depth)
    listed += [c for number, op in enumerate(others) for c in _for_some_tiles(op, number, depth=depth)]
    return sorted(listed, key=lambda one: -one.key_dim)


def _share(op: str) -> str:
    if OPS[op].kernels == "additive":
        return "additive"
    return "every tile" if op in EVERY_TILE else "some tiles"


def _for_every_tile(ops: Sequence[str], *, depth: str) -> list[Configuration]:
    """Pairs of widths in bfloat16; fewer of the delta family in float32, slow to compile; float16 a third."""
    listed = []
    for op_number, (k_number, v_number) in product(range(len(ops)), product(range(len(PAIRS) // 3), range(3))):
        pair, is_delta = PAIRS[3 * k_number + v_number], OPS[ops[op_number]].kernels == "delta"
        for dtype_number, dtype in enumerate(("bfloat16", "float32", "float16")):
            if depth == "full":
                listed += [Configuration(ops[op_number], *sizes, dtype, tuple(CASES)) for sizes in pair]
                continue
            is_third = v_number == (k_number + dtype_number + is_delta * op_number) % 3
            is_thin = dtype == "float16" or (is_delta and dtype == "float32")
            if (depth == "quick" and (not is_third or dtype == "float16")) or (is_thin and not is_third):
                continue
            if is_delta and dtype != "bfloat16" and (depth == "quick" or dtype == "float16") and k_number % 2:
                continue
            turn = v_number + k_number + 5 * op_number + dtype_number
            sizes = pair[turn % 2]
            sets: tuple[str, ...] = ("batch", ROTATING[(turn + k_number) % len(ROTATING)])
            if dtype == "bfloat16" and depth == "usual" and pair[0] in COMMON:
                sizes, sets = pair[0], tuple(CASES)
            listed.append(Configuration(ops[op_number], *sizes, dtype, sets))
    return listed


def _for_some_tiles(op: str, number: int, *, depth: str) -> list[Configuration]:
    """An exact pair and one in part in bfloat16, one in float32, by turns; block-diagonal ones in eight blocks too."""
    recurrence = OPS[op]
    has_blocks = recurrence.blocks > 1
    exact: HeadSizes = BLOCKS_OF_64_OR_128 if has_blocks else EXACT
    in_part: HeadSizes = BLOCKS_IN_PART if has_blocks else IN_PART
    in_eight: HeadSizes = EIGHT_BLOCKS if has_blocks and recurrence.is_timed else ()
    if depth == "full":
        return [
            Configuration(op, *sizes, dtype, tuple(CASES), 8 if sizes in in_eight else 0)
            for sizes in (*exact, *in_part, *in_eight)
            for dtype in ("bfloat16", "float32", "float16")
        ]
    sets = [("batch", ROTATING[(number + turn) % len(ROTATING)]) for turn in range(4)]
    found = [Configuration(op, *exact[number % len(exact)], "bfloat16", sets[0])]
    if depth == "usual" or number % 3 == 0:
        found.append(Configuration(op, *in_part[number % len(in_part)], "float32", sets[1]))
    if depth == "usual":
        narrow = "float16" if number % 4 == 3 else "bfloat16"
        found.append(Configuration(op, *in_part[(number + 1) % len(in_part)], narrow, sets[2]))
        found += [Configuration(op, *sizes, "bfloat16", sets[3], 8) for sizes in in_eight]
    return found
