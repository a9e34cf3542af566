"""The part of the report's page that is about servers."""

from __future__ import annotations

from shoal.monitor.report.charts import escape, stacked_bar
from shoal.monitor.report.summary import Summary
from shoal.monitor.report.tables import MOST_VALUE, columns_table, cut, table
from shoal.monitor.servers import SERVER_TITLES, on_one_host, server_facts, server_rows, staleness_shares, sync_words
from shoal.monitor.wording import percent

NOTE = (
    "Since the last start; what a server counted before it died is lost. Copies are of shards that others hold. "
    "Received and sent is what went over sockets."
)


def servers_body(summary: Summary) -> str:
    """A table of the servers, and a histogram of staleness. Nothing for a run without servers."""
    seen, cost = summary.servers, summary.cost
    facts = [("sync", sync_words(summary.config))] if seen is not None or cost is not None else []
    if seen is not None:
        facts += [fact for fact in server_facts(seen) if fact[0] != "staleness"]
    if cost is not None:
        facts.append(("samples", cost.words))
    told = table((name, cut(words, MOST_VALUE)) for name, words in facts if words) if facts else ""
    if seen is None:
        return told
    servers = columns_table(SERVER_TITLES, server_rows(seen, near=on_one_host(summary.config)), words=1)
    return (
        f'<div class="wide">{servers}</div>'
        f'<div class="two"><div>{_histogram(staleness_shares(seen))}</div><div>{told}</div></div>'
    )


def _histogram(shares: list[tuple[str, float]]) -> str:
    if not shares:
        return '<p class="empty">No gradient was pushed yet.</p>'
    largest = max(share for _, share in shares)
    rows = [
        f"<span>{escape(lacked)}</span>{stacked_bar([('compute', percent(share), share)], largest)}"
        f"<span>{percent(share)}</span>"
        for lacked, share in shares
    ]
    return (
        '<p class="soft">Staleness: steps that the weights lacked with which a gradient was computed</p>'
        f'<div class="bars">{"".join(rows)}</div>'
    )
