"""The nearest output of a stage that an artifact was made from: read from manifests, without the index."""

from collections import deque

from lineage.errors import ArtifactError
from lineage.graph.places import artifact_at
from lineage.manifest import InputRecord, Manifest
from lineage.store import Store


def nearest_ancestor(store: Store, stage: str, fingerprint: str, wanted: str) -> str | None:
    """Fingerprint of the output of ``wanted`` that is the fewest steps above an artifact; None: there is none.

    It looks through sources that are outputs of this store. Where a manifest is gone, the way ends.
    """
    waiting = deque([(stage, fingerprint)])
    seen = set(waiting)
    while waiting:
        manifest = _manifest(store, *waiting.popleft())
        for given in manifest.inputs.values() if manifest else ():
            parent = _made_by_stage(store, given)
            if parent and parent[0] == wanted:
                return parent[1]
            if parent and parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return None


def _made_by_stage(store: Store, given: InputRecord) -> tuple[str, str] | None:
    if given.source is None:
        return given.artifact, given.fingerprint
    place = artifact_at(store.root, given.source.path)
    manifest = _manifest(store, *place) if place else None
    return (manifest.stage, manifest.fingerprint) if manifest else None


def _manifest(store: Store, stage: str, fingerprint: str) -> Manifest | None:
    try:
        return store.entry(stage, fingerprint).manifest()
    except ArtifactError:  # it cannot be read: as good as gone
        return None
