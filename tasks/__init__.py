"""Tasks: what a model is trained on and scored by; one class a task, with its Config, data and metric."""

from .byte_text import ByteText
from .mqar import Mqar
from .parity import Parity
from .task import ACCURACY, IGNORE, TASKS, Batch, Metric, Task, TaskSpec, generator_for
from .token_stream import Split, TokenStream

__all__ = [
    "ACCURACY",
    "IGNORE",
    "TASKS",
    "Batch",
    "ByteText",
    "Metric",
    "Mqar",
    "Parity",
    "Split",
    "Task",
    "TaskSpec",
    "TokenStream",
    "generator_for",
]
