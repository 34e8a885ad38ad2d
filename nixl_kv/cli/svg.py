"""A drawing as it grows: the few shapes that are needed, written as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from xml.etree import ElementTree as ET

FONT: Final = "ui-sans-serif, Helvetica, Arial, sans-serif"
INK: Final = "#1f2933"
SOFT: Final = "#66727f"


@dataclass(frozen=True)
class Box:
    """A rectangle."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its other side."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Its other end."""
        return self.top + self.height


class Canvas:
    """Grows downwards; what is drawn later lies on top."""

    def __init__(self, width: float) -> None:
        """A white sheet, whose height is known at the end."""
        self.width = width
        self._root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg")
        self._sheet = ET.SubElement(self._root, "rect", fill="#ffffff", rx="8")

    def rect(self, box: Box, fill: str, *, title: str = "", opacity: float = 1.0) -> None:
        """A box; what a pointer over it says."""
        made = ET.SubElement(
            self._root,
            "rect",
            x=_number(box.left),
            y=_number(box.top),
            width=_number(box.width),
            height=_number(box.height),
            fill=fill,
        )
        self._finish(made, title, opacity)

    def ribbon(self, source: Box, target: Box, fill: str, *, title: str = "") -> None:
        """From the right side of one box to the left side of another, as high as each of them."""
        middle = (source.right + target.left) / 2
        outline = (
            f"M {_pair(source.right, source.top)} "
            f"C {_pair(middle, source.top)} {_pair(middle, target.top)} "
            f"{_pair(target.left, target.top)} "
            f"L {_pair(target.left, target.bottom)} "
            f"C {_pair(middle, target.bottom)} {_pair(middle, source.bottom)} "
            f"{_pair(source.right, source.bottom)} Z"
        )
        made = ET.SubElement(self._root, "path", d=outline, fill=fill)
        self._finish(made, title, 0.28)

    def text(
        self,
        place: tuple[float, float],
        words: str,
        *,
        size: float = 12,
        look: str = "",
        fill: str = INK,
    ) -> None:
        """Words with their baseline at a place; `look` may have "bold", "soft", "middle"."""
        made = ET.SubElement(self._root, "text", x=_number(place[0]), y=_number(place[1]))
        made.set("font-family", FONT)
        made.set("font-size", _number(size))
        made.set("fill", SOFT if "soft" in look else fill)
        if "bold" in look:
            made.set("font-weight", "600")
        if "middle" in look:  # a halo, because it stands on a ribbon
            made.attrib |= {"text-anchor": "middle", "paint-order": "stroke", "stroke": "#ffffff"}
            made.attrib |= {"stroke-width": "4", "stroke-linejoin": "round"}
        made.text = words

    def lines(self, place: tuple[float, float], lines: Sequence[str]) -> float:
        """Several lines of text. Returns where the next one would be."""
        left, top = place
        for words in lines:
            self.text((left, top), words, look="soft")
            top += 18
        return top

    def to_xml(self, height: float) -> str:
        """The file's content."""
        for made in (self._root, self._sheet):
            made.set("width", _number(self.width))
            made.set("height", _number(height))
        self._root.set("viewBox", f"0 0 {_number(self.width)} {_number(height)}")
        ET.indent(self._root)
        return ET.tostring(self._root, encoding="unicode") + "\n"

    def _finish(self, made: ET.Element, title: str, opacity: float) -> None:
        if opacity < 1:
            made.set("fill-opacity", _number(opacity))
        if title:
            ET.SubElement(made, "title").text = title


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _pair(x: float, y: float) -> str:
    return f"{_number(x)},{_number(y)}"
