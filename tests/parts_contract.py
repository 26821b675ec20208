"""The contract of import-linter that the parts of the package import only what pyproject.toml lets them."""

from importlinter import Contract, ContractCheck, fields, output
from tests.parts import is_wrong, parts


class PartsContract(Contract):
    """Each module imports its own part and those that its part may import; the package itself has no part."""

    parts = fields.ListField(subfield=fields.StringField())

    def check(self, graph, verbose):
        """Find the imports that no part may make."""
        known, found = parts(self.parts), []
        for one in sorted(each for each in graph.modules if each.partition(".")[0] == "rankmesh"):
            others = [other for other in graph.find_modules_directly_imported_by(one) if other.startswith("rankmesh.")]
            found += [f"{one} -> {other}" for other in sorted(others) if is_wrong(one, other, known)]
        return ContractCheck(kept=not found, metadata={"wrong": found})

    def render_broken_contract(self, check):
        """Print them."""
        for line in check.metadata["wrong"]:
            output.print_error(line)
