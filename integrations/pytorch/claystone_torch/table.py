"""Reads operators.toml into the rows that the extension takes."""


def _alternatives(given, *section):
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, str):
            one = {"do": one}
        yield one.get("if", ""), one["do"], *section


def rows(table):
    """The name of each operator with its alternatives: a condition, a program, whether it is elementwise, and whether apart."""
    for section, entries in table.items():
        kind = section.startswith("elementwise"), section.startswith("apart")
        short = entries.pop("same", {})
        for program, names in short.items():
            for name in names:
                yield name, [("", program.replace("NAME", name.split(".")[0]), *kind)]
        for name, given in entries.items():
            yield name, list(_alternatives(given, *kind))
