"""The checks a recurrence must pass, for the package's own transitions and for yours."""

from .catalogue import CATALOGUE
from .mixer import check_mixer
from .problem import Problem, Sizes, Subject
from .report import HarnessError, Report, Result
from .transition import CHECKS, applicable_checks, check_transition, transition_checks

__all__ = [
    "CATALOGUE",
    "CHECKS",
    "HarnessError",
    "Problem",
    "Report",
    "Result",
    "Sizes",
    "Subject",
    "applicable_checks",
    "check_mixer",
    "check_transition",
    "transition_checks",
]
