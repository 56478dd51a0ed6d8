"""Reads operators.toml into the rows that the extension takes."""


def _alternatives(given, elementwise):
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, str):
            one = {"do": one}
        yield one.get("if", ""), one["do"], elementwise


def rows(table):
    """The name of each operator with its alternatives: a condition, a program, and whether it is elementwise."""
    for section, entries in table.items():
        elementwise = section.startswith("elementwise")
        short = entries.pop("same", {})
        for program, names in short.items():
            for name in names:
                yield name, [("", program.replace("NAME", name.split(".")[0]), elementwise)]
        for name, given in entries.items():
            yield name, list(_alternatives(given, elementwise))
