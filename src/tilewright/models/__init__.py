"""Put Tilewright's functions into a whole model, and take them out again."""

from tilewright.models.compare import Difference, diff
from tilewright.models.patch import Patched, apply, revert
from tilewright.models.replacements.attention import register

__all__ = ["Difference", "Patched", "apply", "diff", "revert"]

register()  # attn_implementation="tilewright", if transformers is imported
