"""`fedloop release`: sign the releases that devices may install. docs/releases.md walks through it.

Offline, with keys:     keygen, init, add, withdraw, extend, rotate-root, rotate-online, sign, staged
With a coordinator:     online-keys, fetch, publish, list, status
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coordinator.commands.options import Json, Shown, command_group, remote_command
from coordinator.commands.output import print_json
from coordinator.errors import UserError
from coordinator.operator.client import Coordinator, OperatorClient, connect
from coordinator.releases import roles
from coordinator.releases.roles import OFFLINE_KEYS, ONLINE_ROLES, parse_release

if TYPE_CHECKING:
    # Every `fedloop` command imports this module; only commands that sign or stage import these.
    from securesystemslib.signer import CryptoSigner, Key

    from coordinator.operator.staging import Staging

PASSPHRASE = "FEDLOOP_RELEASE_PASSPHRASE"

app = command_group("Signed releases: keys, offline signing, publishing, and expiry.")

StagingDir = Annotated[
    Path,
    typer.Option(
        "--staging", metavar="DIR", help="Folder with the documents to sign; it travels.", show_default=False
    ),
]
KeyDirs = Annotated[
    list[Path],
    typer.Option("--keys", metavar="DIR", help="Folder of keys; may be repeated.", show_default=False),
]
OnlineFile = Annotated[
    Path,
    typer.Option(
        "--online", metavar="FILE", help="Output of `fedloop release online-keys`.", show_default=False
    ),
]


@app.command(epilog="Example: fedloop release keygen ~/keys --key root-1")
def keygen(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or existing folder for the keys.")],
    key: Annotated[
        list[str] | None,
        typer.Option("--key", help=f"Only these of {', '.join(OFFLINE_KEYS)}; may be repeated."),
    ] = None,
    no_passphrase: Annotated[
        bool, typer.Option("--no-passphrase", help="Leave the private keys unencrypted.")
    ] = False,
) -> None:
    """Make the offline keys: two for root, one for targets. Best each root key by a different person, on a separate machine.

    Prompts for the passphrase, or reads it from FEDLOOP_RELEASE_PASSPHRASE.
    """
    from coordinator.operator import offline_keys

    names = tuple(key or OFFLINE_KEYS)
    if unknown := set(names) - set(OFFLINE_KEYS):
        raise UserError(f"--key {min(unknown)}: expected one of {', '.join(OFFLINE_KEYS)}")
    passphrase = None if no_passphrase else _new_passphrase()
    for path in offline_keys.make(folder, names, passphrase):
        typer.echo(f"{path}  keep it off the network; {path.with_suffix('.pub').name} goes to `release init`")


@app.command("online-keys", epilog="Example: fedloop release online-keys > online.json")
def online_keys(
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate",
            help="Make new keys; they take effect once root and targets name them. Earlier unused ones are dropped.",
        ),
    ] = False,
    coordinator: Coordinator = None,
) -> None:
    """Print the coordinator's public keys as JSON, for `init` and `rotate-online`; created at first use."""
    client = connect(coordinator)
    keys = client.post("/releases/online-keys/rotate") if rotate else client.get("/releases/online-keys")
    print_json(keys)


@app.command(epilog="Example: fedloop release init --keys ~/keys --online online.json --staging stick/")
def init(keys: KeyDirs, online: OnlineFile, staging: StagingDir) -> None:
    """Stage a new repository: a root that needs both root keys, and targets without releases. Then `sign`."""
    from coordinator.operator import offline_keys

    named = offline_keys.public_keys(keys)
    if lacking := set(OFFLINE_KEYS) - named.keys():
        raise UserError(f"--keys: {min(lacking)}.pub is in none of these folders")
    online_keys = _read_online_keys(online)
    _open_staging(staging).initialize(
        named | {role: online_keys[role] for role in (roles.SNAPSHOT, roles.TIMESTAMP)},
        online_keys[roles.ROLLOUTS],
        _now(),
    )
    _show_staged(_open_staging(staging))


@app.command(epilog="Example: fedloop release fetch --staging stick/")
def fetch(staging: StagingDir, coordinator: Coordinator = None) -> None:
    """Update the staging folder to what the coordinator has published."""
    from coordinator.operator import release_transfer

    for name in release_transfer.fetch(connect(coordinator), _open_staging(staging)):
        typer.echo(f"{name} was staged for an older version and is dropped; stage the change again")
    _show_staged(_open_staging(staging))


@app.command(epilog="Example: fedloop release add runs/export --staging stick/")
def add(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Release folder: manifest.json and model.tflite.")
    ],
    staging: StagingDir,
) -> None:
    """Stage a release: copy its files and name them in the next targets. Then `sign`."""
    typer.echo(f"staged {_open_staging(staging).add(folder, _now())}")
    _show_staged(_open_staging(staging))


@app.command(epilog="Example: fedloop release withdraw cnn:3 --staging stick/")
def withdraw(
    release: Annotated[str, typer.Argument(metavar="NAME:VERSION", help="The release.")], staging: StagingDir
) -> None:
    """Stage the removal of a release. Devices that run it keep it until they get another. Then `sign`."""
    _open_staging(staging).withdraw(parse_release(release), _now())
    _show_staged(_open_staging(staging))


@app.command(epilog="Example: fedloop release extend --root --staging stick/")
def extend(
    staging: StagingDir, root: Annotated[bool, typer.Option("--root", help="Extend the root too.")] = False
) -> None:
    """Stage unchanged targets for another half year, and the root for another year. Then `sign`."""
    _open_staging(staging).extend(_now(), root=root)
    _show_staged(_open_staging(staging))


@app.command("rotate-root", epilog="Example: fedloop release rotate-root --keys new-keys/ --staging stick/")
def rotate_root(keys: KeyDirs, staging: StagingDir) -> None:
    """Stage a root with the keys in these folders in place of those with the same names. Old and new keys then `sign`."""
    from coordinator.operator import offline_keys

    named = offline_keys.public_keys(keys)
    if not named:
        raise UserError(f"--keys: none of {', '.join(OFFLINE_KEYS)} (.pub) is in these folders")
    _open_staging(staging).change_keys(named, _now())
    _show_staged(_open_staging(staging))


@app.command(
    "rotate-online", epilog="Example: fedloop release rotate-online --online new.json --staging stick/"
)
def rotate_online(online: OnlineFile, staging: StagingDir) -> None:
    """Stage root and targets with the new online keys of `online-keys --rotate`. Then `sign`."""
    _open_staging(staging).change_keys(_read_online_keys(online), _now())
    _show_staged(_open_staging(staging))


@app.command(epilog="Example: fedloop release sign --keys ~/keys --staging stick/")
def sign(keys: KeyDirs, staging: StagingDir) -> None:
    """Sign the staged documents with the keys in these folders. Needs no network. Lists the changes first."""
    from coordinator.operator.staging import TRUSTED_ROOT

    staged = _open_staging(staging)
    for line in staged.describe_changes() or ["nothing is staged"]:
        typer.echo(line)
    for folder in keys:
        if not (folder / TRUSTED_ROOT).exists():
            root_keys = ", ".join(staged.describe_root_keys())
            typer.echo(
                f"{folder} signs for the first time, and from now on only for this repository: root by {root_keys}"
            )
    signatures = sum(staged.sign(_signers(folder), folder / TRUSTED_ROOT) for folder in keys)
    if not signatures and staged.describe_changes():
        raise UserError(
            f"none of these keys is needed; missing: {'; '.join(staged.missing_signatures()) or 'none'}"
        )
    typer.echo(f"{signatures} signature{'s' * (signatures != 1)} made")
    _show_missing(staged)


@app.command(epilog="Example: fedloop release staged --staging stick/")
def staged(staging: StagingDir) -> None:
    """Show the staged changes and the missing signatures."""
    _show_staged(_open_staging(staging))


@app.command(epilog="Example: fedloop release publish --staging stick/")
def publish(staging: StagingDir, coordinator: Coordinator = None) -> None:
    """Send signed documents to the coordinator, which verifies them and serves them to devices."""
    from rich.console import Console
    from rich.progress import Progress

    from coordinator.operator import release_transfer

    with Progress(console=Console(stderr=True), transient=True) as bars:

        def progress(path: str, size: int) -> Callable[[int], None]:
            task = bars.add_task(path, total=size)
            return lambda count: bars.advance(task, count)

        version = release_transfer.publish(connect(coordinator), _open_staging(staging), progress)
    typer.echo(f"published targets {version}")


@remote_command(app, "list", example="fedloop release list")
def list_releases(client: OperatorClient) -> Shown:
    """List the published releases."""
    releases = client.get("/releases")
    lines = [
        f"{each['model']}:{each['version']}  {each['model_bytes']} bytes  SHA-256 {each['model_sha256']}"
        for each in releases
    ]
    return releases, lines or ["no releases; stage one: fedloop release add FOLDER --staging DIR"]


@app.command(epilog="Example: fedloop release status --json")
def status(coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show when each role expires, and who must sign before."""
    report = connect(coordinator).get("/releases/status")
    if as_json:
        print_json(report)
        return
    if not report["exists"]:
        typer.echo("no signed releases yet; begin with: fedloop release init")
    for each in report["roles"]:
        who = "people sign it" if each["offline"] else "renewed by the coordinator"
        validity = "" if each["is_valid"] else "  NOT VALID"
        typer.echo(
            f"{each['role']:<10} {each['version']:>5}  until {each['expires'][:16]} UTC  {who}{validity}"
        )
    for line in report["warnings"]:
        typer.echo(f"warning: {line}", err=True)


def _open_staging(folder: Path) -> Staging:
    from coordinator.operator.staging import Staging

    return Staging(folder)


def _now() -> datetime:
    return datetime.now(UTC)


def _show_staged(staging: Staging) -> None:
    for line in staging.describe_changes() or ["nothing is staged"]:
        typer.echo(line)
    _show_missing(staging)


def _show_missing(staging: Staging) -> None:
    missing = staging.missing_signatures()
    for line in missing:
        typer.echo(f"still to be signed: {line}")
    if not missing and staging.describe_changes():
        typer.echo(f"all signatures are there; next: fedloop release publish --staging {staging.folder}")


def _signers(folder: Path) -> list[CryptoSigner]:
    from coordinator.operator import offline_keys

    signers = []
    for path in offline_keys.key_files(folder):
        passphrase = _passphrase(f"Passphrase of {path}") if offline_keys.is_encrypted(path) else None
        signers.append(offline_keys.load(path, passphrase))
    return signers


def _new_passphrase() -> bytes:
    passphrase = _passphrase("Passphrase for the new keys", confirm=True)
    if not passphrase:
        raise UserError("an empty passphrase protects nothing; use --no-passphrase if that is what you want")
    return passphrase


def _passphrase(prompt: str, *, confirm: bool = False) -> bytes:
    if (passphrase := os.environ.get(PASSPHRASE)) is not None:
        return passphrase.encode()
    if not sys.stdin.isatty():
        raise UserError(f"no terminal to ask for a passphrase on; give it in {PASSPHRASE}")
    entered: str = typer.prompt(
        prompt, hide_input=True, confirmation_prompt=confirm, default="", show_default=False
    )
    return entered.encode()


def _read_online_keys(path: Path) -> dict[str, Key]:
    from coordinator.operator import offline_keys

    document = offline_keys.read_json(path)
    if not isinstance(document, dict) or document.keys() != set(ONLINE_ROLES):
        raise UserError(
            f"{path}: expected the keys {', '.join(ONLINE_ROLES)}, as `release online-keys` prints"
        )
    return {role: offline_keys.read_public(document[role], f"{path}: {role}") for role in ONLINE_ROLES}
