"""What staged documents change and which signatures they need, in lines for the people who sign. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from securesystemslib.signer import Key
from tuf.api.metadata import Metadata, Root, Targets

from coordinator.operator import signed_documents
from coordinator.operator.offline_keys import NAME_FIELD
from coordinator.releases import checks, roles


def describe_root(before: Root | None, root: Root) -> list[str]:
    """Version and term of a root, and how its keys differ from those of the published one."""
    lines = [f"root {root.version}, until {root.expires:%Y-%m-%d}"]
    return lines + [f"  {line}" for line in _describe_key_changes(before, root)]


def describe_targets(before: Targets | None, targets: Targets, files: Mapping[str, Path]) -> list[str]:
    """Version and term of targets, the releases they add and withdraw, and a change of the rollouts key.

    Args:
        files: target path -> file, of every new release.
    """
    lines = [f"targets {targets.version}, until {targets.expires:%Y-%m-%d}"]
    published = checks.releases_in(before.targets if before is not None else {})
    staged = checks.releases_in(targets.targets)
    for name in sorted(staged.keys() - published.keys()):
        manifest, file = staged[name]
        lines.append(f"  adds {name}: {file.length} bytes, SHA-256 {file.hashes['sha256']}")
        lines.append(f"    its manifest: SHA-256 {manifest.hashes['sha256']}")
        lines.append(f"    {_describe_real_rows(signed_documents.real_rows(files[name.manifest]))}")
    lines += [f"  withdraws {name}" for name in sorted(published.keys() - staged.keys())]
    keys = rollouts_keys(targets)
    if before is None or rollouts_keys(before).keys() != keys.keys():
        lines.append(f"  rollouts are signed by {', '.join(map(describe_key, keys.values()))}")
    return lines


def missing_signatures(
    published: Root | None, root: Metadata[Root] | None, targets: Metadata[Targets] | None, newest_root: Root
) -> list[str]:
    """The signatures that staged documents still need. A new root needs those of its predecessor too."""
    lines: list[str] = []
    if root is not None:
        for delegator in (published, root.signed):
            lines += _unsigned(delegator, roles.ROOT, root) if delegator is not None else ()
    if targets is not None:
        lines += _unsigned(newest_root, roles.TARGETS, targets)
    return list(dict.fromkeys(lines))


def rollouts_keys(targets: Targets) -> dict[str, Key]:
    """Content -> key, of the keys that sign rollouts."""
    delegations = targets.delegations
    assert delegations is not None
    return _keys_by_content(delegations.keys, targets.get_delegated_role(roles.ROLLOUTS).keyids)


def describe_key(key: Key) -> str:
    """`root-1 (0123456789ab)`: the name that its owner gave it, and the beginning of its id."""
    name = key.unrecognized_fields.get(NAME_FIELD)
    return f"{name} ({key.keyid[:12]})" if name else f"key {key.keyid[:12]}"


def _describe_real_rows(count: int) -> str:
    if not count:
        return "no rows of real data"
    return f"PUBLISHES {count} row{'s' * (count != 1)} of real data, readable by everyone with the release"


def _describe_key_changes(before: Root | None, root: Root) -> Iterator[str]:
    """Compares keys by content: an id may be reused for another key."""
    for role, delegation in root.roles.items():
        staged = _keys_by_content(root.keys, delegation.keyids)
        published = _keys_by_content(before.keys, before.roles[role].keyids) if before is not None else {}
        for content in [each for each in staged if each not in published]:
            yield f"{role} is signed by {describe_key(staged[content])}"
        for content in [each for each in published if each not in staged]:
            yield f"{role} is no longer signed by {describe_key(published[content])}"
        if before is not None and before.roles[role].threshold != delegation.threshold:
            yield f"{role} needs {delegation.threshold} signatures, {before.roles[role].threshold} before"


def _unsigned(delegator: Root, role: str, metadata: Metadata[Root] | Metadata[Targets]) -> Sequence[str]:
    result = delegator.get_verification_result(role, metadata.signed_bytes, metadata.signatures)
    if result.verified:
        return []
    return [f"{role} {metadata.signed.version} by {describe_key(key)}" for key in result.unsigned.values()]


def _keys_by_content(keys: Mapping[str, Key], key_ids: Iterable[str]) -> dict[str, Key]:
    return {checks.content_of(keys[key_id]): keys[key_id] for key_id in key_ids if key_id in keys}
