-- What the ledger asks its file, by name.

-- name: number
-- entries that count: versions, and what left; and where it began after a loss
SELECT coalesce((SELECT value FROM setting WHERE name = 'beginning'), 0)
    + coalesce((SELECT max(id) FROM version), 0) + coalesce((SELECT max(id) FROM departure), 0)

-- name: workbench
-- tables of one connection, in memory: the documents at hand, and who pays for those that cost something
CREATE TEMP TABLE batch (
    row INTEGER PRIMARY KEY, document TEXT NOT NULL, name TEXT,
    version INTEGER, owner INTEGER, origin INTEGER, fits INTEGER
);
CREATE TEMP TABLE fresh (
    version INTEGER NOT NULL, owner INTEGER NOT NULL, counted INTEGER NOT NULL,
    PRIMARY KEY (version, owner)
) WITHOUT ROWID;
CREATE TEMP TABLE stated (document INTEGER NOT NULL, subject INTEGER NOT NULL);

-- name: load
INSERT INTO batch (document, name, version, owner, origin, fits)
SELECT ?1, ?2, v.id,
    coalesce(d.lineage, d.id, (SELECT coalesce(lineage, id) FROM document WHERE name = ?1)),
    (SELECT coalesce(lineage, id) FROM document WHERE id = v.origin), d.name = ?1
FROM (SELECT 1) LEFT JOIN version v ON v.name = ?2 LEFT JOIN document d ON d.id = v.document

-- name: resolve
UPDATE batch SET version = v.id, owner = coalesce(d.lineage, d.id)
FROM version v JOIN document d ON d.id = v.document
WHERE v.name = batch.name AND batch.version IS NULL

-- name: first with a text
-- the lineage that has had a text longest; versions of an older Isthmus are known by the whole content alone
SELECT coalesce(d.lineage, d.id) FROM version v JOIN document d ON d.id = v.document
WHERE v.text = :text OR (v.text IS NULL AND v.content = :content) ORDER BY v.id LIMIT 1

-- name: fresh
INSERT OR IGNORE INTO fresh
SELECT coalesce(version, -row), owner,
    NOT :shared
    OR NOT EXISTS (SELECT 1 FROM charge c WHERE c.version = b.version AND c.release = :release)
FROM batch b
WHERE NOT EXISTS (
    SELECT 1 FROM charge c WHERE c.version = b.version AND c.release = :release AND c.peer = :peer
)

-- name: fresh elsewhere
-- the text is another lineage's too, which has it released once more
INSERT OR IGNORE INTO fresh
SELECT f.version, b.origin, f.counted FROM batch b JOIN fresh f ON f.version = coalesce(b.version, -b.row)
WHERE b.origin IS NOT NULL

-- name: overspent
SELECT asked.owner, asked.times, coalesce(s.epsilon, 0.0), coalesce(s.square, 0.0), coalesce(s.rho, 0.0)
FROM (SELECT owner, count(*) AS times FROM fresh WHERE counted >= :least GROUP BY owner) asked
LEFT JOIN spent s ON s.document = asked.owner AND s.peer = :peer AND s.field = :field
WHERE NOT (
    coalesce(s.epsilon, 0.0) + asked.times * :epsilon <= :most_epsilon
    OR coalesce(s.square, 0.0) + asked.times * :square <= :most_square
    OR coalesce(s.rho, 0.0) + asked.times * :rho <= :most_rho
)
ORDER BY coalesce(s.epsilon, 0.0) + asked.times * :epsilon DESC

-- name: add
INSERT INTO spent (document, peer, field, epsilon, square, rho)
SELECT owner, :peer, :field, count(*) * :epsilon, count(*) * :square, count(*) * :rho
FROM fresh WHERE counted >= :least GROUP BY owner
ON CONFLICT (document, peer, field) DO UPDATE SET
    epsilon = epsilon + excluded.epsilon, square = square + excluded.square, rho = rho + excluded.rho

-- name: sums
SELECT d.name, coalesce(p.name, ''), s.field, s.epsilon, s.square, s.rho,
    (SELECT count(*) FROM version v JOIN document o ON o.id = v.document
        WHERE o.id = d.id OR o.lineage = d.id)
FROM spent s JOIN document d ON d.id = s.document LEFT JOIN peer p ON p.id = s.peer

-- name: admit
INSERT INTO version (document, name) SELECT DISTINCT d.id, b.name
FROM batch b JOIN document d ON d.name = b.document WHERE b.version IS NULL

-- name: current
SELECT v.name, v.content, v.text FROM batch b
LEFT JOIN document d ON d.name = b.document LEFT JOIN version v ON v.id = d.current ORDER BY b.row

-- name: adopt
-- give a version of an older Isthmus, which knew nothing of texts, its text
UPDATE version SET text = :text FROM document d
WHERE d.name = :document AND version.id = d.current AND version.content = :content
    AND version.text IS NULL RETURNING version.name

-- name: enter
INSERT INTO version (document, name, content, text, origin)
SELECT id, :name, :content, :text, nullif(:first, coalesce(lineage, id)) FROM document WHERE name = :document

-- name: departure
INSERT INTO departure (at, kind, peer, items, charged, epsilon, unit, note)
VALUES (:at, :kind, :peer, :items, 0, :epsilon, :unit, :note)

-- name: charged departure
INSERT INTO departure (at, kind, peer, release, items, charged, epsilon, unit, note)
SELECT ?, ?, ?, r.id, (SELECT count(DISTINCT version) FROM fresh),
    (SELECT count(DISTINCT version) FROM fresh WHERE counted), r.epsilon, r.adjacency, ''
FROM release r WHERE r.id = ?

-- name: dearest
JOIN (SELECT document, max(epsilon) AS most FROM spent WHERE peer = 0
    AND document NOT IN (SELECT coalesce(o.lineage, o.id) FROM belongs b JOIN document o ON o.id = b.document)
    GROUP BY document ORDER BY 2 DESC LIMIT ?) dear USING (document)
ORDER BY dear.most DESC, d.name

-- name: departures
SELECT d.id AS number, d.at, d.kind, p.name AS peer, coalesce(r.mechanism, '') AS mechanism,
    coalesce(r.name, '') AS release, coalesce(r.fields, '[]') AS fields, d.epsilon, NULL AS guarantee, d.unit,
    d.items, d.charged, d.note
FROM departure d JOIN peer p ON p.id = d.peer LEFT JOIN release r ON r.id = d.release ORDER BY d.id

-- name: departures by kind
SELECT d.kind, p.name AS peer, coalesce(r.mechanism, '') AS mechanism, coalesce(r.fields, '[]') AS fields,
    d.epsilon, NULL AS guarantee, d.unit, count(*) AS times, sum(d.items) AS items, sum(d.charged) AS charged,
    max(d.at) AS last
FROM departure d JOIN peer p ON p.id = d.peer LEFT JOIN release r ON r.id = d.release
GROUP BY d.kind, p.name, 3, 4, d.epsilon, d.unit ORDER BY min(d.id)

-- name: last incidents
SELECT note FROM departure WHERE kind = 'incident' ORDER BY id DESC LIMIT 3

-- name: charges
SELECT d.name AS document, (SELECT count(*) FROM version w WHERE w.document = d.id AND w.id <= v.id) AS version,
    p.name AS peer, gone.kind, r.mechanism, r.name AS release, r.fields, r.epsilon, r.shared, gone.at
FROM charge c JOIN version v ON v.id = c.version JOIN document d ON d.id = v.document
JOIN release r ON r.id = c.release JOIN peer p ON p.id = c.peer JOIN departure gone ON gone.id = c.departure

-- name: charges of a document
-- the table is ordered by release: a document's charges are found by asking for each of them
SELECT d.name AS document, (SELECT count(*) FROM version w WHERE w.document = d.id AND w.id <= v.id) AS version,
    p.name AS peer, gone.kind, r.mechanism, r.name AS release, r.fields, r.epsilon, r.shared, gone.at
FROM document d JOIN version v ON v.document = d.id CROSS JOIN release r
JOIN charge c ON c.release = r.id AND c.version = v.id
JOIN peer p ON p.id = c.peer JOIN departure gone ON gone.id = c.departure
WHERE d.id = (SELECT coalesce(lineage, id) FROM document WHERE name = :document)
    OR d.lineage = (SELECT coalesce(lineage, id) FROM document WHERE name = :document)
ORDER BY v.id, c.departure

-- name: worked out
-- how many sums the charges make, and how many of them are not those that the ledger keeps
WITH part AS (
    SELECT version, release, 0 AS peer, CASE WHEN r.shared THEN 1 ELSE count(*) END AS times
    FROM charge JOIN release r ON r.id = release GROUP BY version, release
    UNION ALL SELECT version, release, peer, 1 FROM charge
), total AS (
    SELECT w.document, part.peer, f.value AS field,
        sum(part.times * r.epsilon) AS epsilon, sum(part.times * r.epsilon * r.epsilon) AS square,
        sum(part.times * rho_of(r.epsilon)) AS rho
    FROM part JOIN payer w ON w.version = part.version
    JOIN release r ON r.id = part.release JOIN json_each(r.fields) f
    GROUP BY w.document, part.peer, f.value
)
SELECT count(*), count(*) FILTER (
    WHERE s.epsilon IS NULL OR abs(s.epsilon - t.epsilon) > 1e-6 * max(1, t.epsilon)
        OR abs(s.square - t.square) > 1e-6 * max(1, t.square)
        OR abs(s.rho - t.rho) > 1e-6 * max(1, t.rho)
) FROM total t LEFT JOIN spent s USING (document, peer, field)

-- name: last unlinked
SELECT coalesce(max(id), 0) FROM departure WHERE id < :departure OR :departure = 0

-- name: linked departures
SELECT d.id AS departure, d.at, d.kind, p.name AS peer, r.name AS release, r.mechanism, r.fields, d.epsilon,
    d.unit, d.items, d.charged, d.note
FROM departure d JOIN peer p ON p.id = d.peer LEFT JOIN release r ON r.id = d.release

-- name: linked versions
SELECT c.departure, v.name FROM charge c JOIN version v ON v.id = c.version ORDER BY c.departure, v.id

-- name: linked subjects
SELECT b.document || ' ' || s.name FROM belongs b JOIN subject s ON s.id = b.subject ORDER BY b.document, s.name

-- name: fresh versions
SELECT v.name FROM version v WHERE v.id IN (SELECT version FROM fresh) ORDER BY v.id

-- name: stated subjects
-- what is new of whom documents are about
INSERT INTO stated SELECT d.id, s.id FROM document d, subject s
WHERE d.name = ? AND s.name = ?
    AND NOT EXISTS (SELECT 1 FROM belongs b WHERE b.document = d.id AND b.subject = s.id)

-- name: inherited
-- who gets a document that was another's gets all that the other's documents have spent
INSERT OR IGNORE INTO belongs SELECT other.document, n.subject
FROM stated n JOIN belongs before ON before.document = n.document JOIN belongs other ON other.subject = before.subject

-- name: of a subject
-- the lineages of subjects, and what the dearest field of each has spent
SELECT b.subject, coalesce(d.lineage, d.id) AS document,
    coalesce((SELECT max(epsilon) FROM spent s
        WHERE s.document = coalesce(d.lineage, d.id) AND s.peer = {peer}), 0.0) AS most
FROM belongs b JOIN document d ON d.id = b.document {only} GROUP BY 1, 2

-- name: touched
-- the subjects of those who pay
WHERE b.subject IN (
    SELECT o.subject FROM fresh f JOIN belongs o ON o.document = f.owner
    UNION SELECT o.subject FROM fresh f JOIN document c ON c.lineage = f.owner
        JOIN belongs o ON o.document = c.id
)

-- name: fields of a subject
SELECT s.field, sum(s.epsilon) FROM spent s WHERE s.peer = 0 AND s.document IN (
    SELECT coalesce(d.lineage, d.id) FROM belongs b JOIN document d ON d.id = b.document WHERE b.subject = ?
) GROUP BY s.field ORDER BY s.field

-- name: versions of a subject
SELECT count(*) FROM version WHERE document IN (SELECT document FROM belongs WHERE subject = ?)

-- name: last anchor
SELECT json_extract(event, '$.number'), json_extract(event, '$.hash') FROM link
WHERE json_extract(event, '$.log') = ? ORDER BY number DESC LIMIT 1
