"""`isthmus sketch`: build word counts that may leave a silo, publish them, and search those of others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.cli.command import Command, add, add_json, close, fitted, print_json, say, to_write, whole
from isthmus.errors import ConfigError

if TYPE_CHECKING:
    from isthmus.private import CountsView
    from isthmus.tables import Queries
    from isthmus.text import Tokens

FIELDS = ("title", "body")
EPSILON = 8.0

_BUILD = "isthmus sketch build cran south --group north"
_PUBLISH = "isthmus sketch publish south north -o south.released"
_ASK = """isthmus sketch ask north south.released "supersonic flow over a wing"
isthmus sketch ask north south.released --queries north.tsv -k 100 -o cross.txt"""


def _build_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Sketch documents into a silo's folder, with keys and a ledger. Nothing leaves."
    add(parser, "corpus CORPUS", "a collection by name (pydocs, cran, …) or folder")
    add(parser, "folder DIR", "the silo's folder; made if it is not there")
    add(parser, "--silo NAME", "the documents of one silo of the collection only")
    add(parser, "--group DIR", "the folder of another silo on this machine, whose group.key to share")
    add(parser, "--width", "cells of a sketch (by the documents' length)", type=whole(2))
    add(parser, "--budget", "ε of a new ledger, over a document's life (9)", type=float)
    shape = "{folder, documents, copies, seconds, tokens_per_second, fields: [{field, tokens, cells, width}]}"
    add_json(parser, shape)


def _publish_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Noise every cell once and write the result for a peer, after booking what it costs."
    add(parser, "folder DIR", "the silo's folder, as build has left it")
    add(parser, "peer PEER", "who gets the file")
    add(parser, "-o --out FILE", "the file to hand over", type=to_write, required=True)
    _release_arguments(parser)
    add_json(parser, "{file, peer, fields, documents, bytes, epsilon, certainty, surest, meaning}")


def _release_arguments(parser: argparse.ArgumentParser) -> None:
    add(
        parser, "--field", "which fields (both; a search, the body)", dest="fields", choices=FIELDS, nargs="+"
    )
    add(parser, "--epsilon", "ε of one replaced word (%(default)s)", type=float, default=EPSILON)


def _ask_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Search another silo's documents: in a file that it published, which tells it nothing, or by asking"
        " its folder about cells. Prints the best documents with every word's count and error bar, or with"
        " --queries writes the sixteen features of each query's best documents as LETOR rows (their grades"
        " are not known and stand as 0)."
    )
    add(parser, "own DIR", "the asker's own silo folder: keys, and words to read by")
    add(parser, "source SOURCE", "a published file, or a silo's folder to ask")
    add(parser, "query QUERY", "what to look for", nargs="?")
    add(parser, "--queries FILE", "many queries: .jsonl, or qid<TAB>text")
    add(parser, "-o --out FILE", "where the features of --queries go", type=to_write)
    add(parser, "-k", "documents of a query (%(default)s)", type=whole(1), default=10)
    add(parser, "--peer PEER", "who asks a folder, for its ledger (the asker's folder's name)")
    _release_arguments(parser)
    add(parser, "--decoys", "for each word asked about (%(default)s)", type=whole(0), default=2)
    shape = "a list of {document, score, words: {word: [count, error]}}; with --queries"
    add_json(parser, f"{shape} {{file, queries, rows}}")


def _build(arguments: argparse.Namespace) -> None:
    import time

    from isthmus.corpora import load
    from isthmus.private import Keyring, SiloFolder
    from isthmus.private.ledger import Budget

    corpus = load(arguments.corpus)
    corpus = corpus if arguments.silo is None else corpus.silo(arguments.silo)
    shared = None if arguments.group is None else Keyring.at(arguments.group).group_key()
    folder = SiloFolder.at(arguments.folder, create=True)
    if shared is not None:
        folder.keys.join(shared)
    budget = None if arguments.budget is None else Budget(arguments.budget)
    began = time.perf_counter()
    built = folder.build(corpus.documents, width=arguments.width, budget=budget)
    seconds = time.perf_counter() - began
    columns = ("tokens", "cells", "width")
    done: dict[str, Any] = {
        "folder": str(folder.path),
        "documents": built[0].documents,
        "copies": len(corpus.documents) - built[0].documents,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(sum(part.tokens for part in built) / seconds),
        "fields": [{name: getattr(part, name) for name in ("field", *columns)} for part in built],
    }
    facts = {"documents": f"{done['documents']:,}", "tokens a second": f"{done['tokens_per_second']:,}"}
    if done["copies"]:
        facts["copies left out"] = f"{done['copies']:,}"
    facts |= {part.field: f"{part.cells:,} cells not empty, {part.width:,} a document" for part in built}
    wrote = [path for path in sorted(folder.path.iterdir()) if not path.name.startswith(".")]
    close(arguments, f"sketched {corpus.name}", done, wrote, facts)


def _publish(arguments: argparse.Namespace) -> None:
    from isthmus.private import LEDGER, SiloFolder, write_released

    folder = SiloFolder.at(arguments.folder)
    fields = arguments.fields or folder.fields()
    with folder.ledger() as ledger:
        desk = folder.desk(arguments.epsilon, ledger, fields)
        size = write_released(desk, folder.keys.group_key(), arguments.peer, arguments.out)
    owner = desk.owners[0]
    (cost,) = owner.release.mechanism.costs(owner.release.terms, owner.no_columns)
    done = {
        "file": arguments.out,
        "peer": arguments.peer,
        "fields": list(fields),
        "documents": len(owner),
        "bytes": size,
        "epsilon": cost.epsilon,
        "certainty": cost.certainty,
        "surest": cost.surest,
        "meaning": cost.meaning,
    }
    facts = {"documents": f"{done['documents']:,}", "bytes": f"{size:,}", "cost of each": cost.meaning}
    title = f"published {' and '.join(fields)} to {arguments.peer}"
    close(arguments, title, done, [arguments.out, folder.path / LEDGER], facts)


def _ask(arguments: argparse.Namespace) -> None:
    from isthmus.text import tokenise

    queries = _queries(arguments)
    tokens = tokenise(queries.texts)
    if not len(tokens.terms):
        raise ConfigError(f"{queries.texts[0]!r} has no word to look for", key="query")
    view = _look_up(arguments, tokens)
    if arguments.queries is None:
        _show_hits(arguments, view, tokens)
    else:
        _write_features(arguments, view, queries, tokens)
    if Path(arguments.source).is_dir():
        hidden = 1 + arguments.decoys
        say(f"the silo was asked about {hidden} words for each of the query's; it can guess which")
    else:
        say("nothing was asked: the sketches were read here")


def _queries(arguments: argparse.Namespace) -> Queries:
    import numpy as np

    from isthmus.tables import Queries, read_queries

    if (arguments.query is None) == (arguments.queries is None):
        raise ConfigError("ask one QUERY, or those of a file with --queries", key="queries")
    if arguments.queries is None:
        return Queries(("q",), (arguments.query,), np.zeros(1, dtype=np.int64), ("test",))
    if arguments.out is None:
        raise ConfigError("features of --queries go to a file", key="out", expected="-o FILE")
    return read_queries(arguments.queries)


def _look_up(arguments: argparse.Namespace, tokens: Tokens) -> CountsView:
    from isthmus.arrays import Ids
    from isthmus.private import Seeker, SiloFolder, in_memory, read_released

    own = SiloFolder.at(arguments.own)
    words = Ids.of(tokens.terms.words)
    own_words = {name: own.words(name) for name in own.fields()}
    seeker = Seeker(own.keys.group_key(), own_words, own.keys.decoys())
    if not Path(arguments.source).is_dir():
        released = read_released(arguments.source, seeker.key)
        fields = _fields(arguments, tuple(released))
        return seeker.read({name: released[name] for name in fields}, words)
    folder = SiloFolder.at(arguments.source)
    if folder.keys.group_key() != seeker.key:
        problem = f"{arguments.own} and {arguments.source} have different group keys"
        raise ConfigError(problem, key="group", expected="sketch build --group, or isthmus keys")
    fields = _fields(arguments, folder.fields())
    with folder.ledger() as ledger:
        carrier = in_memory(
            folder.desk(arguments.epsilon, ledger, fields), arguments.peer or own.path.resolve().name
        )
        with own.ledger() as book:
            note = f"cells of words, each among {arguments.decoys} decoys"
            book.record("query text", folder.path.resolve().name, items=len(words), note=note)
        return seeker.read(seeker.ask(carrier, fields, words, decoys=arguments.decoys), words)


def _fields(arguments: argparse.Namespace, there: tuple[str, ...]) -> tuple[str, ...]:
    """The named fields, or those needed: all for features, the body (or else the first) for a search."""
    missing = set(arguments.fields or ()) - set(there)
    if missing:
        problem = f"{arguments.source} has no counts of {', '.join(sorted(missing))}"
        raise ConfigError(problem, key="field", expected=" or ".join(there))
    if arguments.fields or arguments.queries:
        return tuple(arguments.fields or there)
    return ("body",) if "body" in there else there[:1]


def _show_hits(arguments: argparse.Namespace, view: CountsView, query: Tokens) -> None:
    from isthmus.report import Table

    hits = list(view.search(query, arguments.k))
    if arguments.json:
        print_json([{"document": hit.document, "score": hit.score, "words": hit.words} for hit in hits])
        return
    records: list[dict[str, Any]] = [
        {"document": hit.document, "score": hit.score}
        | {word: f"{mean:.2f} ± {error:.2f}" for word, (mean, error) in hit.words.items()}
        for hit in hits
    ]
    print(fitted(Table.of(records, digits=3)))


def _write_features(
    arguments: argparse.Namespace, view: CountsView, queries: Queries, tokens: Tokens
) -> None:
    from isthmus.tables import write_letor

    letor = view.letor(
        queries, tokens, view.candidates(tokens, arguments.k), name=Path(arguments.source).stem
    )
    write_letor(letor, arguments.out)
    done = {"file": arguments.out, "queries": len(letor), "rows": letor.rows}
    facts = {"queries": f"{len(letor):,}", "rows": f"{letor.rows:,} of 16 features, without grades"}
    title = f"features over {len(view.documents):,} documents of {letor.name}"
    close(arguments, title, done, [arguments.out], facts)


_ABOUT = "build, publish and ask about word counts that may leave a silo"
_VERBS = (
    Command("build", "sketch a silo's documents into its folder", _BUILD, _build_arguments, _build),
    Command(
        "publish", "write noisy sketches for a peer, and book them", _PUBLISH, _publish_arguments, _publish
    ),
    Command("ask", "search another silo's documents by their private counts", _ASK, _ask_arguments, _ask),
)
COMMANDS = (Command("sketch", _ABOUT, f"{_BUILD} && {_PUBLISH}", verbs=_VERBS),)
