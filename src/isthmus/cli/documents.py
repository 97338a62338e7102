"""`isthmus documents`: open a hit or ask its owner; list, answer and erase on the silo's machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import Command, add, add_json, fitted, folded, say, show, whole
from isthmus.cli.judgements import add_broker, broker_client, silo_store
from isthmus.errors import ConfigError, DataError, ServiceError, plain, several

if TYPE_CHECKING:
    from isthmus.service import Client, DocumentRequest, ErasureReceipt, Hit, NodeSettings, OpenedDocument

CONFIG = "the silo's settings, on its own machine"
SEARCHED = 100
"""Number of hits among which a document is searched."""


def _settings(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    add(
        parser,
        "--config FILE",
        CONFIG if required else f"no broker: {CONFIG}, by its owner",
        required=required,
    )


# commands of people who search


def _open_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "document SILO/ID", "the document, as a search shows it")
    how = parser.add_mutually_exclusive_group(required=True)
    add(how, "--query QUERY", "a search that finds it: only what is shown can be opened")
    add(how, "--request NUMBER", "your request, which its owner has allowed")
    add_broker(parser, "a key with the scope documents, or search for --request")
    add_json(parser, "{silo, document, title, body, characters, link}")


def _open(arguments: argparse.Namespace) -> None:
    with broker_client(arguments) as broker:
        if arguments.request:
            every = broker.requests().requests
            request = next((each for each in every if each.number == arguments.request), None)
            if request is None:
                raise DataError(
                    "you have asked for nothing under this number", cure="isthmus documents requests"
                )
            opened = broker.open_allowed(request)
        else:
            hit = _hit(broker, arguments.document, arguments.query)
            if "open" not in hit.access:
                raise ServiceError(_refusal(hit))
            opened = broker.open(hit)
    show(arguments, opened.model_dump(), _text(opened))
    if opened.characters > len(opened.body):
        say(f"isthmus: the first {len(opened.body):,} of {opened.characters:,} characters")


def _hit(broker: Client, document: str, query: str) -> Hit:
    """The hit for `silo/id` in the results of a query. Raises a DataError if it is not among them."""
    silo, slash, id = document.partition("/")
    if not slash or not id:
        raise ConfigError(f"{document!r} names no document", expected="SILO/ID, as a search shows it")
    answer = broker.search(query, k=SEARCHED, silos=[silo])
    hit = next((hit for hit in answer.hits if hit.document == id), None)
    if hit is None:
        for status in answer.silos:
            if status.status != "answered":
                raise ServiceError(f"{silo} is {status.status}: {plain(status.detail)} (try again later)")
        cure = "use the words of a search that shows it"
        raise DataError(f"no hit of this search in {silo} is the document", cure=cure)
    return hit


def _refusal(hit: Hit) -> str:
    name = f"{hit.silo}/{hit.document}"
    if "ask" in hit.access:
        return f"{hit.silo} opens no documents (isthmus documents ask {name} --query … asks its owner)"
    where = f"it is shown at {hit.link}" if hit.link else "its owner may allow it: open = true in silo.toml"
    return f"{hit.silo} opens no documents; {where}"


def _text(opened: OpenedDocument) -> str:
    lines = [f"{plain(opened.title)}  {plain(opened.silo)}/{plain(opened.document)}"]
    lines += [plain(opened.link)] if opened.link else []
    return "\n".join([*lines, "", *map(plain, opened.body.splitlines())])


def _ask_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "document SILO/ID", "the document, as a search shows it")
    add(parser, "--query QUERY", "the search that shows it; its owner reads it", required=True)
    add(parser, "--reason TEXT", "why you want it, up to 1,000 letters", default="")
    add(parser, "--name", "let the owner know the name of your key; some want it")
    add_broker(parser, "a key with the scope search")
    add_json(parser, "{number, silo, document, query, reason, state, word, at, answered}")


def _ask(arguments: argparse.Namespace) -> None:
    with broker_client(arguments) as broker:
        hit = _hit(broker, arguments.document, arguments.query)
        if "ask" not in hit.access:
            raise ServiceError(f"the owner of {hit.silo} takes no requests (ask in its silo.toml)")
        if "name" in hit.access and not arguments.name:
            raise ServiceError(f"the owner of {hit.silo} wants to know who asks: add --name")
        request = broker.ask(arguments.query, hit, reason=arguments.reason, named=arguments.name)
    show(arguments, request.model_dump(), request.number)
    say("isthmus: asked; isthmus documents requests shows the owner's answer")


def _requests_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "--all", "all that you may answer, with an administrator's key")
    _settings(parser, required=False)
    add_broker(parser, "your API key")
    add_json(parser, "a list of {number, silo, document, query, reason, state, word, at, answered, person}")


def _requests(arguments: argparse.Namespace) -> None:
    if arguments.config:
        from isthmus.service import owned_documents

        settings, store = silo_store(arguments)
        try:
            requests = owned_documents(settings, store).requests().requests
        finally:
            store.close()
    else:
        with broker_client(arguments) as broker:
            listed = broker.requests(every=arguments.all)
        requests = listed.requests
        for reason in dict.fromkeys(listed.unanswered.values()):  # a reason that silos share is printed once
            silos = ", ".join(plain(silo) for silo, its in listed.unanswered.items() if its == reason)
            say(f"isthmus: {silos}: {plain(reason)}")
    show(arguments, [each.model_dump() for each in requests], _table(requests))


def _table(requests: list[DocumentRequest]) -> str:
    """Requests one below the other, with unbroken numbers, which people copy."""
    blocks = []
    for each in requests:
        lines = [f"{each.number}  {each.state}", f"  {each.silo}/{each.document}, {each.at}"]
        texts = {"asked by": each.person, "query": each.query, "reason": each.reason, "answer": each.word}
        lines += [f"  {name}: {text}" for name, text in texts.items() if text]
        blocks.append("\n".join(folded(f"  {plain(line.strip())}") for line in lines).strip())
    return "\n\n".join(blocks) or "no requests"


def _answer_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "number NUMBER", "of the request, as isthmus documents requests shows it")
    what = parser.add_mutually_exclusive_group(required=True)
    add(what, "--allow", "the document may be opened once, within a week")
    add(what, "--deny", "it may not")
    add(parser, "--word TEXT", "what the asker reads", default="")
    _settings(parser, required=False)
    add_broker(parser, "an administrator's API key")
    add_json(parser, "{number, silo, document, state, word, …}")


def _answer(arguments: argparse.Namespace) -> None:
    from isthmus.service import RequestAnswer, owned_documents

    answer = RequestAnswer(allow=arguments.allow, word=arguments.word[:1_000])
    if arguments.config:
        settings, store = silo_store(arguments)
        try:
            done = owned_documents(settings, store).answer(arguments.number, answer)
        finally:
            store.close()
    else:
        with broker_client(arguments) as broker:
            every = broker.requests(every=True).requests
            request = next((each for each in every if each.number == arguments.number), None)
            if request is None:
                raise DataError("no request of this number", cure="isthmus documents requests --all")
            done = broker.answer(request, allow=answer.allow, word=answer.word)
    show(arguments, done.model_dump(), f"{done.state}  {plain(done.silo)}/{plain(done.document)}")


# commands of the silo's owner


def _list_arguments(parser: argparse.ArgumentParser) -> None:
    _settings(parser)
    add(parser, "--find WORDS", "only those whose id or title has these words", default="")
    add(parser, "--source NAME", "only those of this source", default="")
    add(parser, "-n --most", "how many (%(default)s)", type=whole(1), default=100)
    add_json(parser, "a list of {id, title, source, language, allow, subject}")


def _list(arguments: argparse.Namespace) -> None:
    from isthmus.report import Table

    _, store = silo_store(arguments)
    try:
        rows = store.listed(source=arguments.source, words=arguments.find, most=arguments.most)
        total = store.count()
    finally:
        store.close()
    columns = ("id", "title", "source", "language", "allow", "subject")
    places = [at for at in range(len(columns)) if at < 4 or any(row[at] for row in rows)]
    lines = tuple(tuple(plain(row[at]) for at in places) for row in rows)
    listed = fitted(Table(tuple(columns[at] for at in places), lines)) if lines else "no documents"
    show(arguments, [dict(zip(columns, row, strict=True)) for row in rows], listed)
    say(f"isthmus: {len(rows):,} of {total:,} documents")


def _erase_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "ids ID", "documents, as isthmus documents list shows them", nargs="*")
    add(parser, "--subject ID", "all that is about a subject: a patient, a customer", default="")
    _settings(parser)
    add(parser, "--receipt FILE", "write the receipt there, too")
    add_json(
        parser,
        "{silo, at, why, subject, documents: [{id, removed, hidden, released}], judgements, requests,"
        " rewritten, exports, relearn, remains, not_undone}",
    )


def _named(arguments: argparse.Namespace) -> None:
    """Raise a ConfigError unless the command names a document or a subject."""
    if not arguments.ids and not arguments.subject:
        raise ConfigError("nothing is named", expected="ids of documents, or --subject ID")


def _erase(arguments: argparse.Namespace) -> None:
    from isthmus.service import read_node

    _named(arguments)
    settings = read_node(arguments.config)
    receipt = _erased(settings, arguments.ids, arguments.subject)
    if arguments.receipt:
        Path(arguments.receipt).write_text(receipt.model_dump_json(indent=2) + "\n", encoding="utf-8")
    done = {(True, False): "erased", (False, True): "hidden", (False, False): "gone already"}
    lines = [f"{done[each.removed, each.hidden]}  {plain(each.id)}" for each in receipt.documents]
    lines.append(
        f"with {several(receipt.judgements, 'judgement')} and {several(receipt.requests, 'request')}"
    )
    lines += [f"written anew: {', '.join(receipt.rewritten)}"] if receipt.rewritten else []
    lines += [f"written anew, an export: {plain(line)}" for line in receipt.exports]
    lines += [f"learned with it: {plain(line)}" for line in receipt.relearn]
    lines += [f"known still: {line}" for line in receipt.remains]
    lines += [f"not undone: {line}" for line in receipt.not_undone]
    show(arguments, receipt.model_dump(), folded("\n".join(lines)))


def _erased(settings: NodeSettings, ids: list[str], subject: str) -> ErasureReceipt:
    """Erase through the running node, or in the silo's folder if none is running."""
    from isthmus.service import ErasureReceipt, Node, ask_node, erase, folder_lock, is_in_use

    if is_in_use(settings.folder):
        return ask_node(settings.folder, "erase", {"ids": ids, "subject": subject}, ErasureReceipt)
    with folder_lock(settings.folder), Node(settings).offline() as node:
        return erase(node, ids, subject=subject)


def _retention_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Erase what is older than keep_days and keep_judgements_days of the sources say, now; a node does so"
        " at its start and every day."
    )
    _settings(parser)
    how = parser.add_mutually_exclusive_group()
    add(how, "--dry-run", "only tell what would go")
    add(how, "--confirm", "also where more than half of the silo goes at once")
    add_json(
        parser,
        "{silo, at, sources: [{source, keep_days, keep_judgements_days, documents, judgements}], ids, waits,"
        " done, receipt}",
    )


def _retention(arguments: argparse.Namespace) -> int:
    from isthmus.service import Node, RetentionReport, ask_node, folder_lock, is_in_use, read_node
    from isthmus.service import apply_retention as apply

    settings = read_node(arguments.config)
    how = {"dry_run": arguments.dry_run, "confirmed": arguments.confirm}
    if is_in_use(settings.folder):
        report = ask_node(settings.folder, "retention", how, RetentionReport)
    else:
        with folder_lock(settings.folder), Node(settings).offline() as node:
            report = apply(node, **how)
    verb = "erased" if report.done else "older than that"
    lines = [
        f"{plain(each.source)}: {several(each.documents, 'document')} (keep_days {each.keep_days or '–'}), "
        f"{several(each.judgements, 'judgement')} (keep_judgements_days {each.keep_judgements_days or '–'}) "
        f"{verb}"
        for each in report.sources
    ] or ["no source of this silo has a rule: keep_days, keep_judgements_days"]
    lines += [f"  {plain(id)}" for id in report.ids[:20]] if not report.done else []
    lines += [f"waits: {report.waits}"] if report.waits else []
    show(arguments, report.model_dump(), folded("\n".join(lines)))
    return 1 if report.waits and not arguments.dry_run else 0


def _readmit_arguments(parser: argparse.ArgumentParser) -> None:
    add(parser, "ids ID", "documents that were erased", nargs="*")
    add(parser, "--subject ID", "all that was erased with a subject, and what comes of it", default="")
    _settings(parser)
    add_json(parser, "{readmitted}")


def _readmit(arguments: argparse.Namespace) -> int:
    _named(arguments)
    _, store = silo_store(arguments)
    try:
        count = store.readmit(arguments.ids) if arguments.ids else 0
        count += store.readmit_subject(arguments.subject) if arguments.subject else 0
    finally:
        store.close()
    result: dict[str, Any] = {"readmitted": count}
    show(arguments, result, f"{count:,} may come back when their source is read")
    return 0 if count else 1


_D = "isthmus documents"
_KEY = "--key ada.key"
_VERBS = (
    Command(
        "open",
        "the whole text of a document that a search has shown, where its silo allows",
        f'{_D} open north/papers/tides.md --query "tidal power" {_KEY}',
        _open_arguments,
        _open,
    ),
    Command(
        "ask",
        "ask the owner of a document for it",
        f'{_D} ask north/papers/tides.md --query "tidal power" --reason "our audit" {_KEY}',
        _ask_arguments,
        _ask,
    ),
    Command(
        "requests",
        "what was asked for and what owners answered: yours, or all of a silo by its owner",
        f"{_D} requests {_KEY}\n{_D} requests --config north/silo.toml",
        _requests_arguments,
        _requests,
    ),
    Command(
        "answer",
        "allow that a document is opened once, or deny it with a word",
        f'{_D} answer 0a1b… --deny --word "ask me by mail" --config north/silo.toml',
        _answer_arguments,
        _answer,
    ),
    Command(
        "list",
        "the documents of a silo",
        f"{_D} list --config north/silo.toml --find tides",
        _list_arguments,
        _list,
    ),
    Command(
        "erase",
        "erase all that is about a subject, or documents: index, judgements, exports, …, with a receipt",
        f"{_D} erase --subject 4711 --config north/silo.toml --receipt erased.json\n"
        f"{_D} erase papers/tides.md --config north/silo.toml",
        _erase_arguments,
        _erase,
    ),
    Command(
        "remove",
        "the same as erase",
        f"{_D} remove papers/tides.md --config north/silo.toml --receipt erased.json",
        _erase_arguments,
        _erase,
    ),
    Command(
        "retention",
        "what is older than the sources' rules say: tell, or erase now",
        f"{_D} retention --dry-run --config north/silo.toml",
        _retention_arguments,
        _retention,
    ),
    Command(
        "readmit",
        "let sources bring documents, or those of a subject, back that were erased",
        f"{_D} readmit papers/tides.md --config north/silo.toml\n"
        f"{_D} readmit --subject 4711 --config north/silo.toml",
        _readmit_arguments,
        _readmit,
    ),
)
COMMANDS = (
    Command(
        "documents",
        "open what was found or ask its owner; list and erase a silo's documents",
        f'{_D} open north/papers/tides.md --query "tidal power" {_KEY}',
        verbs=_VERBS,
    ),
)
