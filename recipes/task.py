"""What a recipe trains on: byte-level text, or multi-query associative recall (MQAR).

These classes only describe a task; the data itself is made in ``statemix.training``.
Sources: arXiv:2312.04927 appendix E (MQAR).
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

BYTE_VALUES = 256


class TextTask(BaseModel):
    """Next-byte prediction over the text files of a folder, split by file into train and held-out."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["text"] = "text"
    folder: str | None = Field(
        None, min_length=1, description="folder of text files; null = the source files of the Python standard library"
    )


class MqarTask(BaseModel):
    """Recall: ``k1 v1 k2 v2 ...``, then some keys again; the label at a repeated key is its value.

    Keys are drawn from the lower half of the model's vocabulary and values from the upper half.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["mqar"] = "mqar"
    num_pairs: int = Field(8, ge=1, description="key-value pairs a sequence; 4 * num_pairs <= seq_len")
    power: float = Field(
        0.01, gt=0, allow_inf_nan=False, description="a in p(gap) ~ a gap^(a - 1): how far queries are from their pairs"
    )
    random_non_queries: bool = Field(True, description="fill the places between queries with random tokens")


def _name_to_mapping(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


TaskSpec = Annotated[TextTask | MqarTask, Field(discriminator="type"), BeforeValidator(_name_to_mapping)]
"""A task by name (``text``) or as a mapping (``{type: mqar, num_pairs: 8}``)."""
