"""SVG pictures with a description, for light and dark colour schemes, without external fonts or files."""

from html import escape

_STYLE = """
.ground { fill: #ffffff; stroke: #d0d7de; }
.panel { fill: #f6f8fa; stroke: #d0d7de; }
.line { stroke: #d0d7de; fill: none; }
.spread { stroke: #1f2328; fill: none; stroke-width: 1.5; }
.arrow { stroke: #57606a; fill: none; stroke-width: 1.5; }
.head { fill: #57606a; }
.track { fill: #eaeef2; }
.ours { fill: #0969da; }
.other { fill: #8c959f; }
.copy { fill: #bf8700; }
.warm { fill: #bc4c00; }
text { fill: #1f2328; font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
.quiet { fill: #57606a; }
.good { fill: #1a7f37; }
.bad { fill: #cf222e; }
.wait { fill: #9a6700; }
.accent { fill: #0969da; }
.mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }
.bold { font-weight: 600; }
@media (prefers-color-scheme: dark) {
  .ground { fill: #0d1117; stroke: #30363d; }
  .panel { fill: #161b22; stroke: #30363d; }
  .line { stroke: #30363d; }
  .spread { stroke: #e6edf3; }
  .arrow { stroke: #9198a1; }
  .head { fill: #9198a1; }
  .track { fill: #21262d; }
  .ours { fill: #4493f8; }
  .other { fill: #6e7681; }
  .copy { fill: #d29922; }
  .warm { fill: #db6d28; }
  text { fill: #e6edf3; }
  .quiet { fill: #9198a1; }
  .good { fill: #3fb950; }
  .bad { fill: #f85149; }
  .wait { fill: #d29922; }
  .accent { fill: #4493f8; }
}
"""


class Picture:
    """An SVG picture; `title` and `description` are for screen readers."""

    def __init__(self, width: int, height: int, title: str, description: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            ' role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f"<style>{_STYLE}</style>",
        ]
        self.box(0.5, 0.5, width - 1, height - 1, "ground", radius=8)

    def box(self, x: float, y: float, width: float, height: float, kind: str, *, radius: float = 0) -> None:
        """Draw a rectangle; `kind` is a class of the style."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:.1f}" height="{height:g}" rx="{radius:g}"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", *, size: float = 14, anchor: str = "start") -> None:
        """Write a line; `kind` may be several classes, `anchor` is start, middle or end."""
        about = f' class="{kind}"' if kind else ""
        self._parts.append(
            f'<text{about} x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> None:
        """Draw a thin line."""
        self._parts.append(f'<path class="{kind}" d="M{x:.1f} {y:g}L{to_x:.1f} {to_y:g}"/>')

    def dot(self, x: float, y: float, kind: str) -> None:
        """Draw a dot; `kind` is a class of the style."""
        self._parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:g}" r="5"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw an arrow along points; its last segment must be horizontal or vertical."""
        path = "L".join(f"{x:g} {y:g}" for x, y in points)
        (from_x, from_y), (x, y) = points[-2:]
        if x == from_x:
            back = -8 if y > from_y else 8
            head = f"M{x:g} {y:g}l-4 {back}h8z"
        else:
            back = -8 if x > from_x else 8
            head = f"M{x:g} {y:g}l{back} -4v8z"
        self._parts += [f'<path class="arrow" d="M{path}"/>', f'<path class="head" d="{head}"/>']

    def __str__(self) -> str:
        """Return the SVG."""
        return "\n".join([*self._parts, "</svg>", ""])
