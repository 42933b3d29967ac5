"""What a written checkpoint takes over from the one that it comes from. Imports no torch."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import cast

TIED = "tie_word_embeddings"


@dataclass(frozen=True)
class Kept:
    """What a written checkpoint has besides the tensors that are exported."""

    passed_through: tuple[str, ...] = ()
    """Prefixes of the names of tensors that are copied as they are."""
    tied_head: tuple[str, str] | None = None
    """Name of a head that the checkpoint stores although it is tied, and that of the embedding."""
    tied: bool | None = None
    """What the config has to say of tied embeddings; None: what it says already."""

    def correct(self, hf: MutableMapping[str, object]) -> None:
        """Write into a ``config.json``, at each level that says so, whether embeddings are tied."""
        if self.tied is None:
            return
        text = hf.get("text_config")
        levels = (hf, cast("MutableMapping[str, object]", text)) if isinstance(text, dict) else (hf,)
        stating = [level for level in levels if level.get(TIED) is not None]
        for level in stating or [hf]:
            level[TIED] = self.tied


NOTHING_KEPT = Kept()
