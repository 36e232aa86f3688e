"""Compares what a pipeline declares with what is registered."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from penstock.batches import compress
from penstock.database.registration import Registration, find_objection
from penstock.database.registry import RegisteredChannel, registered_channels
from penstock.database.statements import statements
from penstock.declaring.declarations import Channel
from penstock.errors import CodecMissing
from penstock.operating.doctor.check import CheckContext, CheckResult
from penstock.pipeline import Pipeline
from penstock.streaming.faults import UnknownShard


@dataclass(frozen=True, slots=True)
class _Registry:
    """What is registered.

    Attributes:
        channels: By their names.
        retired: Names of the channels that were retired.
    """

    channels: Mapping[str, RegisteredChannel]
    retired: Collection[str]

    def find(self, declared: Channel) -> Registration:
        """What is registered under a declared name."""
        found = self.channels.get(declared.name)
        return Registration(
            kind=None if found is None else found.kind,
            shards=None if found is None else found.every_generation[-1].shards,
            fits=None if found is None else found.fits(declared),
            is_retired=declared.name in self.retired,
        )


def declared(context: CheckContext) -> Iterator[CheckResult]:
    """The pipeline declares the channels that are registered, and records belong to registered shards."""
    sql = statements(__package__, context.scope.schema)["retired_channels"]
    registry = _Registry(
        registered_channels(context.connection, context.scope), {name for (name,) in context.connection.execute(sql)}
    )
    for each in context.status.faults.unknown:
        yield _report_unknown(each, registry)
    yield from _check_compression(registry)
    if context.pipeline is None:
        yield CheckResult.ok("channels", "not compared with a pipeline: --app names one to compare with")
        return
    found = [*_check_channels(context.pipeline, registry), *_check_undeclared(context.pipeline, registry)]
    yield from found
    if not found:
        yield CheckResult.ok("channels", f"{len(registry.channels)} registered as declared")


def _report_unknown(unknown: UnknownShard, registry: _Registry) -> CheckResult:
    """Records that no channel has; a trigger goes on to stage for a channel that was retired."""
    name = unknown.shard.channel
    what = f"{unknown.records:,} records (the first is {unknown.first}) are for {str(unknown.shard)!r}"
    if name in registry.retired:
        return CheckResult.error(
            "channels",
            f"{what}, whose channel was retired: they are not published",
            f"find out what staged them; to remove them: penstock channels retire {name} --discard --apply",
        )
    return CheckResult.error(
        "channels",
        f"{what}, whose channel is not registered, or lacks the shard: they are not published",
        "declare the channel, with the shards that are registered, in the pipeline of the streamer and in that of the "
        "application; penstock channels list shows them",
    )


def _check_compression(registry: _Registry) -> Iterator[CheckResult]:
    """Here, as a streamer or consumer on this machine would find it."""
    for name in sorted(c.name for c in registry.channels.values() if c.entries == "zstd"):
        try:
            compress("zstd", b"")
        except CodecMissing as error:
            yield CheckResult.error("channels", f"{name}: {error}", "pip install 'penstock[zstd]'")


def _check_channels(pipeline: Pipeline, registry: _Registry) -> Iterator[CheckResult]:
    for name, channel in pipeline.channels.items():
        found = registry.find(channel)
        objection = find_objection(channel, found)
        if objection is not None:
            yield CheckResult.error("channels", objection.reason, objection.fix)
        elif found.kind is None:
            message = f"{name} is declared and was never streamed"
            yield CheckResult.warning("channels", message, "penstock stream")


def _check_undeclared(pipeline: Pipeline, registry: _Registry) -> Iterator[CheckResult]:
    for name in sorted(registry.channels.keys() - pipeline.channels.keys()):
        yield CheckResult.warning(
            "channels",
            f"{name} is registered, but the pipeline does not declare it: its records are kept forever",
            "declare it, or run penstock stream for the pipeline that does; if it is gone for good: "
            f"penstock channels retire {name} --apply",
        )
