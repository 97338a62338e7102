-- step 1
CREATE TABLE counter (value INTEGER NOT NULL)

INSERT INTO counter VALUES (0)

CREATE TABLE document (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, source TEXT NOT NULL,
    title TEXT NOT NULL, body TEXT NOT NULL, digest BLOB NOT NULL,
    change INTEGER NOT NULL, removed INTEGER NOT NULL
)

CREATE UNIQUE INDEX document_change ON document (change)

CREATE TABLE judgement (
    query TEXT NOT NULL, document TEXT NOT NULL, peer TEXT NOT NULL, relevant INTEGER NOT NULL,
    at REAL NOT NULL, probability REAL, evidence TEXT NOT NULL,
    PRIMARY KEY (query, document, peer)
) WITHOUT ROWID

CREATE TABLE vector (
    document TEXT NOT NULL, encoder TEXT NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (document, encoder)
) WITHOUT ROWID

-- step 2
CREATE VIRTUAL TABLE words USING fts5 (
    title, body, content='document', content_rowid='number', tokenize='porter unicode61'
)

CREATE TRIGGER document_added AFTER INSERT ON document BEGIN
    INSERT INTO words (rowid, title, body) VALUES (new.number, new.title, new.body);
END

CREATE TRIGGER document_changed AFTER UPDATE ON document BEGIN
    INSERT INTO words (words, rowid, title, body)
    VALUES ('delete', old.number, old.title, old.body);
    INSERT INTO words (rowid, title, body) VALUES (new.number, new.title, new.body);
END

INSERT INTO words (words) VALUES ('rebuild')

-- step 3
ALTER TABLE vector RENAME TO embedding

-- step 4
-- one word a person; what was kept before is the peer's own
CREATE TABLE said (
    query TEXT NOT NULL, document TEXT NOT NULL, peer TEXT NOT NULL, person TEXT NOT NULL,
    relevant INTEGER NOT NULL, at REAL NOT NULL, probability REAL, evidence TEXT NOT NULL,
    PRIMARY KEY (query, document, peer, person)
) WITHOUT ROWID

INSERT INTO said (query, document, peer, person, relevant, at, probability, evidence)
SELECT query, document, peer, '', relevant, at, probability, evidence FROM judgement

DROP TABLE judgement

ALTER TABLE said RENAME TO judgement

-- step 5
-- documents are found in the index
DROP TRIGGER document_added

DROP TRIGGER document_changed

DROP TABLE words

-- step 6
-- a document is analysed in its language
ALTER TABLE document ADD COLUMN language TEXT NOT NULL DEFAULT ''

CREATE INDEX document_language ON document (language) WHERE removed = 0

-- vectors are in the index; their table stays for the way back
DELETE FROM embedding

-- step 7
-- a document has a type and a date (Unix time), by which searches are narrowed
ALTER TABLE document ADD COLUMN type TEXT NOT NULL DEFAULT ''

ALTER TABLE document ADD COLUMN date INTEGER

-- step 8
-- people ask the owner for documents
CREATE TABLE request (
    number TEXT PRIMARY KEY, document TEXT NOT NULL, peer TEXT NOT NULL, person TEXT NOT NULL,
    name TEXT NOT NULL, query TEXT NOT NULL, reason TEXT NOT NULL, at REAL NOT NULL,
    state TEXT NOT NULL, word TEXT NOT NULL, answered REAL
) WITHOUT ROWID

CREATE INDEX request_document ON request (document)

-- what was erased, by keyed digests of ids: no source brings it back
CREATE TABLE erased (digest TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID

-- step 9
-- who may see a document, one principal a line, and whom it is about
ALTER TABLE document ADD COLUMN allow TEXT NOT NULL DEFAULT ''

ALTER TABLE document ADD COLUMN subject TEXT NOT NULL DEFAULT ''

CREATE INDEX document_allow ON document (allow, language) WHERE removed = 0

CREATE INDEX document_subject ON document (subject) WHERE subject <> ''

-- step 10
-- when a document came, where it was not there before (Unix time)
ALTER TABLE document ADD COLUMN arrived REAL

-- step 11
-- title and body as JSON, where parts of them are withheld
ALTER TABLE document ADD COLUMN original TEXT NOT NULL DEFAULT ''

-- step 12
-- languages are counted by who may see documents
DROP INDEX document_language
