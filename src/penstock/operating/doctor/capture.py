"""Checks that declared triggers capture changes."""

from collections.abc import Iterator

from penstock.operating.doctor.check import Check, CheckContext, CheckResult
from penstock.schema.capture import inspect_triggers


def triggers(context: CheckContext) -> Iterator[CheckResult]:
    """Each rule with capture by trigger has its trigger, as declared, and there is no other."""
    if context.pipeline is None:
        return
    faults = inspect_triggers(context.connection, context.pipeline)
    for fault in faults:
        report = CheckResult.error if fault.is_refused else CheckResult.warning
        yield report("triggers", fault.message, fault.fix)
    declared = sum(rule.capture == "trigger" for rule in context.pipeline.rules)
    if declared and not faults:
        yield CheckResult.ok("triggers", f"{declared} installed, as their rules declare")


CHECKS: tuple[Check, ...] = (triggers,)
