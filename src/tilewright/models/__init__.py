"""Put Tilewright's functions into a whole model, and take them out again."""

from tilewright.models.compare import Difference, diff
from tilewright.models.patch import Patched, apply

__all__ = ["Difference", "Patched", "apply", "diff"]
