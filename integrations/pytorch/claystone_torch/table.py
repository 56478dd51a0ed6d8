"""Converts operators.toml to the rows that the extension registers."""


def _alternatives(given, *section):
    for one in given if isinstance(given, list) else [given]:
        if isinstance(one, str):
            one = {"do": one}
        yield one.get("if", ""), one["do"], *section


def rows(table):
    """Yields each operator's name and its alternatives: (condition, program, is_elementwise, is_apart)."""
    for section, entries in table.items():
        kind = section.startswith("elementwise"), section.startswith("apart")
        short = entries.pop("same", {})
        for program, names in short.items():
            for name in names:
                yield name, [("", program.replace("NAME", name.split(".")[0]), *kind)]
        for name, given in entries.items():
            yield name, list(_alternatives(given, *kind))
