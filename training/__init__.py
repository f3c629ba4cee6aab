"""Training: tasks, optimizer, loop, checkpoints, comparison of two recipes."""

from .comparison import Comparison, compare
from .loop import Interrupted, train
from .model_folder import load_model, save_model
from .nonfinite import NonFiniteError
from .result import RunResult
from .run_files import plugins_of_run

__all__ = [
    "Comparison",
    "Interrupted",
    "NonFiniteError",
    "RunResult",
    "compare",
    "load_model",
    "plugins_of_run",
    "save_model",
    "train",
]
