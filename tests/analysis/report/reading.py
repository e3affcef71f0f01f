"""HTML as a browser would read it."""

from html.parser import HTMLParser

__all__ = ["Read"]

VOID = {"br", "img", "link", "meta"}


class Read(HTMLParser):
    """Elements with their attributes, rows of cells, and all text; refuses what is not balanced."""

    def __init__(self, content):
        super().__init__(convert_charrefs=True)
        self.elements, self.rows, self.text, self._open = [], [], [], []
        self.feed(content)
        self.close()
        assert not self._open

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self._open.append(name)
        if name == "tr":
            self.rows.append([])
        elif name in ("th", "td"):
            self.rows[-1].append("")

    def handle_endtag(self, name):
        assert self._open.pop() == name

    def handle_data(self, text):
        self.text.append(text)
        if self._open and {"th", "td"} & {*self._open}:
            self.rows[-1][-1] += text

    def named(self, name):
        return [attributes for other, attributes in self.elements if other == name]
