"""The process of a router that finds engines in a Ray cluster: `python -m octavo.ray.finder`."""

from __future__ import annotations

from octavo.errors import ConfigError
from octavo.ray.messages import Channel, Report, Search
from octavo.runtime import logs

_LOOK_S = 0.5


def main() -> None:
    """Report the addresses until the input ends."""
    channel = Channel()
    from octavo.ray.cluster import connect  # noqa: PLC0415 - Ray may print
    from octavo.ray.named_engines import NamedEngines  # noqa: PLC0415

    search = channel.first(Search)
    logs.configure(search.log_level.upper(), search.log_format)
    try:
        connect(search.address)
    except ConfigError as error:
        channel.report(Report(failure=str(error)))
        return
    engines = NamedEngines()
    while not channel.is_closed:
        channel.report(Report(engines.urls(), is_connected=True, is_placed=True, was_ready=True))
        channel.next(_LOOK_S)


if __name__ == "__main__":
    main()
