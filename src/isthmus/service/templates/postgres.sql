-- step 1
CREATE TABLE counter (value BIGINT NOT NULL)

INSERT INTO counter VALUES (0)

CREATE TABLE document (
    id TEXT COLLATE "C" PRIMARY KEY, source TEXT NOT NULL, title TEXT NOT NULL,
    body TEXT NOT NULL, digest BYTEA NOT NULL, change BIGINT NOT NULL UNIQUE,
    removed INTEGER NOT NULL
)

CREATE TABLE judgement (
    query TEXT COLLATE "C" NOT NULL, document TEXT COLLATE "C" NOT NULL,
    peer TEXT COLLATE "C" NOT NULL, relevant INTEGER NOT NULL, at DOUBLE PRECISION NOT NULL,
    probability DOUBLE PRECISION, evidence TEXT NOT NULL, PRIMARY KEY (query, document, peer)
)

CREATE TABLE vector (
    document TEXT COLLATE "C" NOT NULL, encoder TEXT NOT NULL, value REAL[] NOT NULL,
    PRIMARY KEY (document, encoder)
)

-- step 2
-- cut where the limit of a megabyte of positions would refuse a document
ALTER TABLE document ADD COLUMN words TSVECTOR GENERATED ALWAYS AS (
    setweight(to_tsvector('english', left(title, 10000)), 'A')
    || to_tsvector('english', left(body, 200000))
) STORED

CREATE INDEX document_words ON document USING gin (words)

-- step 3
-- pgvector has a type of the other name
ALTER TABLE vector RENAME TO embedding

-- step 4
-- one word a person; what was kept before is the peer's own
ALTER TABLE judgement ADD COLUMN person TEXT COLLATE "C" NOT NULL DEFAULT '',
    DROP CONSTRAINT judgement_pkey, ADD PRIMARY KEY (query, document, peer, person)

-- step 5
-- documents are found in the index
ALTER TABLE document DROP COLUMN words

-- step 6
-- a document is analysed in its language
ALTER TABLE document ADD COLUMN language TEXT NOT NULL DEFAULT ''

CREATE INDEX document_language ON document (language) WHERE removed = 0

-- vectors are in the index; their table stays for the way back
DELETE FROM embedding

-- step 7
-- a document has a type and a date (Unix time), by which searches are narrowed
ALTER TABLE document ADD COLUMN type TEXT NOT NULL DEFAULT ''

ALTER TABLE document ADD COLUMN date BIGINT

-- step 8
-- people ask the owner for documents
CREATE TABLE request (
    number TEXT COLLATE "C" PRIMARY KEY, document TEXT COLLATE "C" NOT NULL, peer TEXT COLLATE "C" NOT NULL,
    person TEXT COLLATE "C" NOT NULL, name TEXT NOT NULL, query TEXT NOT NULL, reason TEXT NOT NULL,
    at DOUBLE PRECISION NOT NULL, state TEXT NOT NULL, word TEXT NOT NULL, answered DOUBLE PRECISION
)

CREATE INDEX request_document ON request (document)

-- what was erased, by keyed digests of ids: no source brings it back
CREATE TABLE erased (digest TEXT COLLATE "C" PRIMARY KEY, at DOUBLE PRECISION NOT NULL)

-- step 9
-- who may see a document, one principal a line, and whom it is about
ALTER TABLE document ADD COLUMN allow TEXT NOT NULL DEFAULT ''

ALTER TABLE document ADD COLUMN subject TEXT NOT NULL DEFAULT ''

CREATE INDEX document_allow ON document (allow, language) WHERE removed = 0

CREATE INDEX document_subject ON document (subject) WHERE subject <> ''

-- step 10
-- when a document came, where it was not there before (Unix time)
ALTER TABLE document ADD COLUMN arrived DOUBLE PRECISION

-- step 11
-- title and body as JSON, where parts of them are withheld
ALTER TABLE document ADD COLUMN original TEXT NOT NULL DEFAULT ''

-- step 12
-- languages are counted by who may see documents
DROP INDEX document_language
