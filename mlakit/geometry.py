"""The widths of a model: `mlakit.model.geometry` under a shorter path."""

from mlakit.model.geometry import PRESETS, MLAGeometry, Rope, RopeParameters, RowShape, yarn_mscale

__all__ = ["PRESETS", "MLAGeometry", "Rope", "RopeParameters", "RowShape", "yarn_mscale"]
