"""Recipes: a model and its training as one strict YAML file."""

from .errors import RecipeError
from .layer_table import LayerRow, LayerTable, layer_table, render
from .loading import build, load, shipped
from .recipe import ModelConfig, Recipe
from .training_config import TrainingConfig

__all__ = [
    "LayerRow",
    "LayerTable",
    "ModelConfig",
    "Recipe",
    "RecipeError",
    "TrainingConfig",
    "build",
    "layer_table",
    "load",
    "render",
    "shipped",
]
