"""What ``posttrain certify`` prints."""

from dataclasses import asdict

from flows.rehearsal.certify import Certified
from flows.reports.tables import empty_table, plain_text
from lineage.certificates.certificate import Comparison


def certificate_table(found: list[Certified]) -> str:
    """A line per stage and interruption; then where the certificates are."""
    table = empty_table("stage", "interruption", "verdict", "what was found")
    for each in found:
        for how, comparison in each.certificate.comparisons.items():
            before, after = comparison.num_workers
            workers = f", workers {before} to {after}" if before != after else ""
            table.add_row(each.certificate.stage, how + workers, comparison.verdict, _found(comparison))
    paths = "\n".join(f"{each.certificate.stage}: {each.path}" for each in found)
    return f"{plain_text(table)}\n\n{paths}"


def certificate_dict(found: list[Certified]) -> dict[str, object]:
    """The object that ``certify --json`` prints."""
    return {"stages": [{"path": str(each.path), **asdict(each.certificate)} for each in found]}


def _found(comparison: Comparison) -> str:
    steps = ", ".join(str(step) for step in comparison.resumed_at)
    resumed = f"resumed from step {steps}" if steps else ""
    numbers = {
        "losses apart by {:.2g}": comparison.loss_difference,
        "weights apart by {:.2g} of what the training moved them": comparison.weight_difference,
    }
    apart = [words.format(number) for words, number in numbers.items() if number]
    return "; ".join(part for part in (comparison.detail, *apart, resumed) if part)
