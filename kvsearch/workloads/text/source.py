"""`Source`: one text with its name and hash."""

import hashlib
from dataclasses import dataclass

from kvsearch.errors import TextError, quoted
from kvsearch.frozen import has_half, whole


@dataclass(frozen=True)
class Text:
    """A text itself, where a path could stand: `kvsearch.search(model, Text("It was ..."))`.

    Attributes:
        text: all of it.
        name: for records; letters, digits and `-` read best.
    """

    text: str
    name: str = "text"


@dataclass(frozen=True)
class Source:
    """One text.

    Attributes:
        name: short, without folders: the same text has the same name on every machine.
        text: all of it.
        sha256: of its UTF-8 bytes.
        announcement: a sentence for people: what the text is.
    """

    name: str
    text: str
    sha256: str
    announcement: str

    @classmethod
    def of(cls, name: str, text: str, announcement: str) -> "Source":
        """A source with its hash.

        Raises:
            TextError: half of a character is in it, which no file of text can hold.
        """
        if has_half(text):
            raise TextError(
                f"the text {quoted(name)} has half of a character (\\ud800 to \\udfff), which "
                "is no text: decode it again, or leave it out"
            )
        return cls(whole(name), text, hashlib.sha256(text.encode()).hexdigest(), announcement)
