"""`fedloop release`: signing what devices may install. docs/releases.md walks through it.

Offline, with keys:     keygen, init, add, withdraw, extend, rotate-root, rotate-online, sign, staged
With a coordinator:     online-keys, fetch, publish, list, status
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coordinator.command_options import Json
from coordinator.errors import UserError
from coordinator.operator_client import Coordinator, connect
from coordinator.releases import roles
from coordinator.releases.roles import OFFLINE_KEYS, ONLINE_ROLES, release_named

if TYPE_CHECKING:
    # What signs and stages is imported by the commands that do; every `fedloop` command imports this module.
    from securesystemslib.signer import CryptoSigner, Key

    from coordinator.releases.staging import Staging

PASSPHRASE = "FEDLOOP_RELEASE_PASSPHRASE"

app = typer.Typer(
    help="Signed releases: keys, signing without a network, publishing, and what expires when.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

StagingDir = Annotated[
    Path,
    typer.Option(
        "--staging", metavar="DIR", help="Folder of what is being signed; it travels.", show_default=False
    ),
]
KeyDirs = Annotated[
    list[Path],
    typer.Option("--keys", metavar="DIR", help="Folder of keys; may be repeated.", show_default=False),
]
OnlineFile = Annotated[
    Path,
    typer.Option(
        "--online", metavar="FILE", help="What `fedloop release online-keys` printed.", show_default=False
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
    """Make the offline keys: two for root, one for targets. Best each root key by its own person, on its own machine.

    The passphrase is asked for, or read from FEDLOOP_RELEASE_PASSPHRASE.
    """
    from coordinator.releases import offline_keys

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
            help="Make new ones; they count once root and targets name them. Ones that waited for that are dropped.",
        ),
    ] = False,
    coordinator: Coordinator = None,
) -> None:
    """Print the coordinator's public keys as JSON, for `init` and `rotate-online`; it makes them at first use."""
    client = connect(coordinator)
    found = client.post("/releases/online-keys/rotate") if rotate else client.get("/releases/online-keys")
    _print_json(found)


@app.command(epilog="Example: fedloop release init --keys ~/keys --online online.json --staging stick/")
def init(keys: KeyDirs, online: OnlineFile, staging: StagingDir) -> None:
    """Stage a new repository: a root that needs both root keys, and targets without any release. Then `sign`."""
    from coordinator.releases import offline_keys

    named = offline_keys.public_keys(keys)
    if lacking := set(OFFLINE_KEYS) - named.keys():
        raise UserError(f"--keys: {min(lacking)}.pub is in none of these folders")
    found = _online(online)
    _staged(staging).begin(
        named | {role: found[role] for role in (roles.SNAPSHOT, roles.TIMESTAMP)},
        found[roles.ROLLOUTS],
        _now(),
    )
    _show_staged(_staged(staging))


@app.command(epilog="Example: fedloop release fetch --staging stick/")
def fetch(staging: StagingDir, coordinator: Coordinator = None) -> None:
    """Bring the staging folder up to what the coordinator has published."""
    from coordinator.releases import sending

    for name in sending.fetch(connect(coordinator), _staged(staging)):
        typer.echo(f"{name} was staged for an older state and is dropped; stage the change again")
    _show_staged(_staged(staging))


@app.command(epilog="Example: fedloop release add runs/export --staging stick/")
def add(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Release folder: manifest.json and model.tflite.")
    ],
    staging: StagingDir,
) -> None:
    """Stage a release: its files are copied, the next targets name them. Then `sign`."""
    typer.echo(f"staged {_staged(staging).add(folder, _now())}")
    _show_staged(_staged(staging))


@app.command(epilog="Example: fedloop release withdraw cnn:3 --staging stick/")
def withdraw(
    release: Annotated[str, typer.Argument(metavar="NAME:VERSION", help="The release.")], staging: StagingDir
) -> None:
    """Stage that a release is no more. Devices that run it keep it until they are told another. Then `sign`."""
    _staged(staging).withdraw(release_named(release), _now())
    _show_staged(_staged(staging))


@app.command(epilog="Example: fedloop release extend --root --staging stick/")
def extend(
    staging: StagingDir, root: Annotated[bool, typer.Option("--root", help="The root too.")] = False
) -> None:
    """Stage targets as they are for another half year, and the root for another year. Then `sign`."""
    _staged(staging).extend(_now(), root=root)
    _show_staged(_staged(staging))


@app.command("rotate-root", epilog="Example: fedloop release rotate-root --keys new-keys/ --staging stick/")
def rotate_root(keys: KeyDirs, staging: StagingDir) -> None:
    """Stage a root that names the keys in these folders instead of those of the same names. Old and new then `sign`."""
    from coordinator.releases import offline_keys

    named = offline_keys.public_keys(keys)
    if not named:
        raise UserError(f"--keys: none of {', '.join(OFFLINE_KEYS)} (.pub) is in these folders")
    _staged(staging).change_keys(named, _now())
    _show_staged(_staged(staging))


@app.command(
    "rotate-online", epilog="Example: fedloop release rotate-online --online new.json --staging stick/"
)
def rotate_online(online: OnlineFile, staging: StagingDir) -> None:
    """Stage root and targets that name new online keys, of `online-keys --rotate`. Then `sign`."""
    _staged(staging).change_keys(_online(online), _now())
    _show_staged(_staged(staging))


@app.command(epilog="Example: fedloop release sign --keys ~/keys --staging stick/")
def sign(keys: KeyDirs, staging: StagingDir) -> None:
    """Sign what is staged with the keys in these folders. Needs no network. Says first what it is that is signed."""
    from coordinator.releases.staging import TRUSTED_ROOT

    staged = _staged(staging)
    for line in staged.changes() or ["nothing is staged"]:
        typer.echo(line)
    for folder in keys:
        if not (folder / TRUSTED_ROOT).exists():
            named = ", ".join(staged.root_keys())
            typer.echo(
                f"{folder} signs for the first time, and from now on only for this repository: root by {named}"
            )
    made = sum(staged.sign(_signers(folder), folder / TRUSTED_ROOT) for folder in keys)
    if not made and staged.changes():
        raise UserError(
            f"none of these keys is asked for; still needed: {'; '.join(staged.missing()) or 'none'}"
        )
    typer.echo(f"{made} signature{'s' * (made != 1)} made")
    _show_missing(staged)


@app.command(epilog="Example: fedloop release staged --staging stick/")
def staged(staging: StagingDir) -> None:
    """Show what is staged and who has yet to sign it."""
    _show_staged(_staged(staging))


@app.command(epilog="Example: fedloop release publish --staging stick/")
def publish(staging: StagingDir, coordinator: Coordinator = None) -> None:
    """Send what was signed to the coordinator, which verifies it and serves it to devices."""
    from rich.console import Console
    from rich.progress import Progress

    from coordinator.releases import sending

    with Progress(console=Console(stderr=True), transient=True) as bars:
        known: dict[str, Any] = {}

        def progress(path: str, sent: int, size: int) -> None:
            if path not in known:
                known[path] = bars.add_task(path, total=size)
            bars.update(known[path], completed=sent)

        version = sending.publish(connect(coordinator), _staged(staging), progress)
    typer.echo(f"published targets {version}")


@app.command("list", epilog="Example: fedloop release list")
def list_releases(coordinator: Coordinator = None, as_json: Json = False) -> None:
    """List the releases that devices may be told to run."""
    found = connect(coordinator).get("/releases")
    if as_json:
        _print_json(found)
        return
    for each in found:
        typer.echo(
            f"{each['model']}:{each['version']}  {each['model_bytes']} bytes  SHA-256 {each['model_sha256']}"
        )
    if not found:
        typer.echo("no releases; stage one: fedloop release add FOLDER --staging DIR")


@app.command(epilog="Example: fedloop release status --json")
def status(coordinator: Coordinator = None, as_json: Json = False) -> None:
    """Show what expires when, and who must sign until then."""
    found = connect(coordinator).get("/releases/status")
    if as_json:
        _print_json(found)
        return
    if not found["exists"]:
        typer.echo("no signed releases yet; begin with: fedloop release init")
    for each in found["roles"]:
        who = "people sign it" if each["offline"] else "renewed by the coordinator"
        state = "" if each["is_valid"] else "  NOT VALID"
        typer.echo(f"{each['role']:<10} {each['version']:>5}  until {each['expires'][:16]} UTC  {who}{state}")
    for line in found["warnings"]:
        typer.echo(f"warning: {line}", err=True)


def _staged(folder: Path) -> Staging:
    from coordinator.releases.staging import Staging

    return Staging(folder)


def _now() -> datetime:
    return datetime.now(UTC)


def _show_staged(staging: Staging) -> None:
    for line in staging.changes() or ["nothing is staged"]:
        typer.echo(line)
    _show_missing(staging)


def _show_missing(staging: Staging) -> None:
    missing = staging.missing()
    for line in missing:
        typer.echo(f"still to be signed: {line}")
    if not missing and staging.changes():
        typer.echo(f"signed by all; next: fedloop release publish --staging {staging.folder}")


def _signers(folder: Path) -> list[CryptoSigner]:
    from coordinator.releases import offline_keys

    signers = []
    for path in offline_keys.key_files(folder):
        passphrase = _passphrase(f"Passphrase of {path}") if offline_keys.is_encrypted(path) else None
        signers.append(offline_keys.load(path, passphrase))
    return signers


def _new_passphrase() -> bytes:
    passphrase = _passphrase("Passphrase for the new keys", confirm=True)
    if not passphrase:
        raise UserError("an empty passphrase protects nothing; say --no-passphrase if that is what you want")
    return passphrase


def _passphrase(prompt: str, *, confirm: bool = False) -> bytes:
    if (given := os.environ.get(PASSPHRASE)) is not None:
        return given.encode()
    if not sys.stdin.isatty():
        raise UserError(f"no terminal to ask for a passphrase on; give it in {PASSPHRASE}")
    asked: str = typer.prompt(
        prompt, hide_input=True, confirmation_prompt=confirm, default="", show_default=False
    )
    return asked.encode()


def _online(path: Path) -> dict[str, Key]:
    from coordinator.releases import offline_keys

    document = offline_keys.read_json(path)
    if not isinstance(document, dict) or document.keys() != set(ONLINE_ROLES):
        raise UserError(
            f"{path}: expected the keys {', '.join(ONLINE_ROLES)}, as `release online-keys` prints"
        )
    return {role: offline_keys.read_public(document[role], f"{path}: {role}") for role in ONLINE_ROLES}


def _print_json(document: object) -> None:
    typer.echo(json.dumps(document, indent=2))
