"""Read machine code of sm_80 and sm_90: a register that is read before anything has written it is a compiler's fault.

ptxas 12.8.93, the default of Triton 3.4 to 3.7 for sm_90, can hoist the computation of a wgmma descriptor above the
definition of its base. The PTX is right; the machine code adds to a register that has no value yet:

    UIADD3 UR18, UP0, UR18, 0x20, URZ ;
    ...
    HGMMA.64x16x16.F32.BF16 R24, R32, gdesc[UR16].tnspB, R24 ;

A walk over the control flow finds it, whatever the instruction: at each place the registers that some path from the
entry has written, each loop entered once. Reading any other register is a fault. The allocator keeps a register that is
read too early alive from the entry on, so no other variable's value in the same register hides it.

Not faults: reading what only a guarded instruction wrote, keeping one half of a register while the other is set, and
spilling a register without a value, unless what is loaded back is used.

How many registers an operand spans was compared, for some 100,000 instructions of kernels like ours, with the life
ranges that ``nvdisasm -lrm narrow`` of CUDA 12.8 prints; 13.1 prints none for code of ptxas 12.8, so it is no oracle.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One instruction as the disassembler prints it.

    Attributes:
        address: offset in the kernel, bytes.
        text: the whole, with its guard.
        guard: the predicate it runs under, as ``@!P0``; empty if it always runs.
        opcode: with modifiers, as ``LDG.E.128``.
        operands: in order.
    """

    address: int
    text: str
    guard: str
    opcode: str
    operands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def result(self) -> int | None:
        """The place of the register that it writes: of the first operand that is not a predicate."""
        if _NO_RESULT.match(self.opcode):
            return None
        places = (place for place, x in enumerate(self.operands) if not _PREDICATE.fullmatch(x))
        return next(places, None)


@dataclass(frozen=True)
class EarlyRead:
    """An instruction that reads a register which no path from the entry has written."""

    register: str
    instruction: Instruction

    def __str__(self) -> str:
        return f"{self.register} read before it is written at {self.instruction.address:#06x}: {self.instruction.text}"


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+((?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*?))\s*;")
_COMMA = re.compile(r",\s*(?![^\[\]]*\])")
_REGISTER = re.compile(r"\b(U?R)(\d+)(\.64)?\b")
_PREDICATE = re.compile(r"[!~]?U?P(\d+|T|R)")
_NO_RESULT = re.compile(
    r"(ST|STG|STS|STL|STSM|RED|REDG|REDS|LDGSTS|ISETP|FSETP|DSETP|HSETP2|UISETP|PLOP3|UPLOP3|PSETP|R2P|FCHK"
    r"|BAR|B2R|BSSY|BSYNC|BREAK|BMOV|BRA|BRX|JMP|CALL|RET|EXIT|NOP|BPT|KILL|YIELD|NANOSLEEP|MEMBAR|FENCE|ERRBAR|CCTL"
    r"|DEPBAR|LDGDEPBAR|WARPSYNC|WARPGROUP|WARPGROUPSET|USETMAXREG|ARRIVES|UBLKCP|UTMALDG|UTMASTG|UTMACCTL|UTMACMDFLUSH)\b"
)
_STACK = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]")
_DATA_OF_MEMORY = {
    "LD",
    "LDG",
    "LDS",
    "LDL",
    "LDC",
    "ULDC",
    "ST",
    "STG",
    "STS",
    "STL",
    "ATOM",
    "ATOMG",
    "ATOMS",
    "SYNCS",
}
_DOUBLE = {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX"}
_ALL_BITS_BUT_ONE = {f"{0xFFFFFFFF ^ 1 << bit:#x}" for bit in range(32)}


def parse_sass(text: str) -> list[Instruction]:
    """The instructions in what ``cuobjdump --dump-sass`` prints of one kernel."""
    return [
        Instruction(int(address, 16), whole, guard, opcode, tuple(_COMMA.split(operands)) if operands else ())
        for address, whole, guard, opcode, operands in _LINE.findall(text)
    ]


def written(instruction: Instruction) -> set[str]:
    """Registers that it writes, guarded or not."""
    return set() if instruction.result is None else set(_registers(instruction, instruction.result))


def read(instruction: Instruction) -> set[str]:
    """Registers whose value it uses."""
    places = (place for place in range(len(instruction.operands)) if place != instruction.result)
    registers = {register for place in places for register in _registers(instruction, place)}
    return registers - written(instruction) if _keeps_a_part(instruction) else registers


def early_reads(instructions: list[Instruction]) -> list[EarlyRead]:
    """Every read of a register that no path from the entry has written; empty for right code."""
    order, edges = _acyclic(_successors(instructions))
    known: dict[int, set[str]] = {index: set() for index in order}
    found = []
    for index in order:
        instruction, before = instructions[index], known.pop(index)
        copies = _copies(instruction)
        used = read(instruction) - {source for source, _ in copies}
        found += [EarlyRead(register, instruction) for register in sorted(used - before)]
        if copies:
            after = before | {target for source, target in copies if source in before or source == "RZ"}
        else:
            after = before | written(instruction)
        for following in edges[index]:
            known[following] |= after
    return found


def _copies(instruction: Instruction) -> list[tuple[str, str]]:
    """(source, target) of a spill to the stack or a load from there, which are no uses: a register without a value is
    spilled now and then with its neighbours, and harmless while nothing uses what is loaded back."""
    if instruction.name not in {"STL", "LDL"}:
        return []
    data, address = (1, 0) if instruction.name == "STL" else (0, 1)
    place = _STACK.fullmatch(instruction.operands[address])
    if place is None:
        return []
    registers = list(_registers(instruction, data))
    if instruction.operands[data] == "RZ":
        registers = ["RZ"] * _width(instruction, data)
    slots = [f"stack {int(place[1] or '0', 16) + 4 * offset:#x}" for offset in range(len(registers))]
    return list(zip(registers, slots, strict=True) if instruction.name == "STL" else zip(slots, registers, strict=True))


def _keeps_a_part(instruction: Instruction) -> bool:
    """Whether it sets half of a register, a byte of predicates, or a single bit, and leaves the rest as it was."""
    clears_a_bit = instruction.name == "LOP3" and not _ALL_BITS_BUT_ONE.isdisjoint(instruction.operands)
    return clears_a_bit or instruction.name in {"PRMT", "P2R"}


def _registers(instruction: Instruction, place: int) -> Iterator[str]:
    """Registers named or implied by one operand."""
    operand = instruction.operands[place]
    for file, number, is_pair in _REGISTER.findall(operand):
        first, width = int(number), 1
        if operand.startswith("gdesc"):
            # Four registers hold the descriptors of A and B; with A in registers the first two mean nothing.
            first, width = (first, 4) if place == 1 else (first + 2, 2)
        elif is_pair or operand.startswith(f"desc[{file}{number}]"):
            width = 2
        elif "[" not in operand:
            width = _width(instruction, place)
        yield from (f"{file}{first + offset}" for offset in range(width))


def _width(instruction: Instruction, place: int) -> int:
    """Registers that the operand at ``place`` spans, when it is a plain register."""
    name, opcode = instruction.name, instruction.opcode
    if name in _DATA_OF_MEMORY:
        return 4 if ".128" in opcode else 2 if ".64" in opcode else 1
    if name in {"LDSM", "STSM"}:
        return int(opcode[-1]) if opcode[-2:] in {".2", ".4"} else 1
    if name == "CS2R":
        return 1 if ".32" in opcode else 2
    if ".WIDE" in opcode:
        values = [i for i, x in enumerate(instruction.operands) if not _PREDICATE.fullmatch(x)]
        return 2 if place in (values[0], values[-1]) else 1
    if name in _DOUBLE or opcode == "UIADD3.64":
        return 2
    if name in {"F2F", "F2I", "I2F"}:
        return _conversion_width(instruction, place)
    if name in {"HGMMA", "HMMA", "DMMA"}:
        return _matrix_width(instruction, place)
    return 1


def _conversion_width(instruction: Instruction, place: int) -> int:
    """``F2F`` names the result's type, then the source's; the others name what is not 32 bits wide."""
    types = re.findall(r"\.((?:F|S|U|BF)\d+)", instruction.opcode)
    if len(types) == 2:
        return 2 if types[place].endswith("64") else 1
    is_float = place == (0 if instruction.name == "I2F" else 1)
    return 2 if any(x.endswith("64") and (x == "F64") == is_float for x in types) else 1


def _matrix_width(instruction: Instruction, place: int) -> int:
    """Fragments of a warp's or warp group's product; ``HMMA.16816`` is m16n8k16, ``HGMMA.64x128x16`` is m64n128k16."""
    opcode = instruction.opcode
    if instruction.name == "DMMA":
        return (4, 2, 2, 4)[place]
    half_result = re.search(r"MMA\.\w+\.F16\b", opcode) is not None
    if instruction.name == "HGMMA":
        columns = int(opcode.split("x")[1])
        return 4 if place == 1 else columns // (4 if half_result else 2)
    depth = {"16816": 4, "1688": 4 if "TF32" in opcode else 2, "1684": 2}[opcode.split(".")[1]]
    result = 2 if half_result else 4
    return (result, depth, depth // 2, result)[place]


def _successors(instructions: list[Instruction]) -> list[list[int]]:
    """Where control can go after each instruction, as indices."""
    at = {instruction.address: index for index, instruction in enumerate(instructions)}
    after_calls = [index + 1 for index, x in enumerate(instructions) if x.name == "CALL"]
    rejoin: dict[str, int] = {}  # where the threads of a divergent branch meet again
    result = []
    for index, x in enumerate(instructions):
        targets = []
        if x.name == "BSSY":
            rejoin[x.operands[0]] = int(x.operands[1], 16)
        elif x.name in {"BRA", "CALL", "WARPSYNC"}:
            targets += [at[int(y, 16)] for y in x.operands[-1:] if y.startswith("0x") and int(y, 16) in at]
        elif x.name == "RET":
            targets += after_calls
        elif x.name == "BSYNC" and x.operands[0] in rejoin:
            targets.append(at[rejoin[x.operands[0]]])
        is_final = x.name in {"BRA", "EXIT", "RET"} and not x.guard and len(x.operands) < 2
        if not is_final and index + 1 < len(instructions):
            targets.append(index + 1)
        result.append(targets)
    return result


def _acyclic(successors: list[list[int]]) -> tuple[list[int], list[list[int]]]:
    """Indices in topological order from the entry, and the edges without those that close a loop."""
    edges: list[list[int]] = [[] for _ in successors]
    state = [0] * len(successors)  # 0 not met, 1 on the path, 2 done
    done: list[int] = []
    path = [(0, iter(successors[0]))] if successors else []
    if path:
        state[0] = 1
    while path:
        index, rest = path[-1]
        following = next(rest, None)
        if following is None:
            state[index] = 2
            done.append(index)
            path.pop()
        elif state[following] != 1:
            edges[index].append(following)
            if state[following] == 0:
                state[following] = 1
                path.append((following, iter(successors[following])))
    return done[::-1], edges
