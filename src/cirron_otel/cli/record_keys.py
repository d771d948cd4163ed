"""``cirron-otel record sign``, ``seal`` and ``keygen``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import click

from cirron_otel.cli.paper import Paper, run_path
from cirron_otel.errors import RecordKeyError
from cirron_otel.reading.values import clean
from cirron_otel.training_record import seal as sealing
from cirron_otel.training_record import signing

_json_option = click.option("--json", "as_json", is_flag=True, help="Print the seal as JSON.")
_passphrase_option = click.option(
    "--passphrase-env",
    metavar="VAR",
    help=f"Environment variable with the private key's passphrase [{signing.PASSPHRASE_VARIABLE}].",
)


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--key", metavar="PRIV", help="Private key (PEM).")
@click.option("--key-env", metavar="VAR", help="Environment variable with the private key as PEM.")
@click.option(
    "--key-command",
    metavar="CMD",
    help="Command that signs: bytes on its input, their Ed25519 signature on its output.",
)
@click.option("--public-key", metavar="PUB", help="Public key (PEM), with --key-command.")
@_passphrase_option
@_json_option
def sign(  # noqa: PLR0913, PLR0917 - one a choice
    run: str, key: str | None, key_env: str | None, key_command: str | None,
    public_key: str | None, passphrase_env: str | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Seal a finished record and sign the seal.

    Writes record.json and record.sig into the run directory, or nothing where the record does not
    verify. The key comes from one of --key, --key-env and --key-command. Signing again, also with
    another key, replaces both files.
    """
    if sum(option is not None for option in (key, key_env, key_command)) != 1:
        raise click.UsageError("say where the key is: one of --key, --key-env and --key-command")
    if (key_command is None) != (public_key is None):
        raise click.UsageError("--key-command and --public-key go together")
    signer: signing.Signer
    if key_command is not None and public_key is not None:
        signer = signing.CommandSigner(_words(key_command), public_key)
    elif key_env is not None:
        signer = signing.private_key_from_environment(key_env, _asking(passphrase_env))
    else:
        signer = signing.load_private_key(str(key), _asking(passphrase_env))
    content = sealing.sign(run_path(run), signer)
    with Paper() as paper:
        if as_json:
            paper.json(content)
            return
        _print_seal(paper, run, content, "signed")
        paper.line(f"key    {content['signer']['public_key_sha256']}")
        paper.line(f"check  cirron-otel record verify {clean(run)} --key PUB")


@click.command()
@click.argument("run", metavar="RUN")
@_json_option
def seal(run: str, *, as_json: bool) -> None:
    """Seal a finished record without a signature.

    Writes record.json, which shows later changes and lines cut from the end, unless whoever made
    them makes a new seal too; against that, sign.
    """
    content = sealing.seal(run_path(run))
    with Paper() as paper:
        if as_json:
            paper.json(content)
            return
        _print_seal(paper, run, content, "sealed")
        paper.line(f"check  cirron-otel record verify {clean(run)}")


@click.command()
@click.argument("private", metavar="PRIV")
@click.argument("public", metavar="PUB")
@click.option("--encrypt", is_flag=True, help="Protect the private key with a passphrase.")
@_passphrase_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def keygen(
    private: str, public: str, passphrase_env: str | None, *, encrypt: bool, as_json: bool
) -> None:
    """Make a pair of keys for signing: Ed25519, in PEM form.

    PRIV stays with whoever signs, best not on the machine that trains; PUB goes to everybody who
    verifies. Neither file may exist. With --encrypt the passphrase is asked for, or taken from the
    environment.
    """
    passphrase = None
    if encrypt:
        passphrase = _given_passphrase(passphrase_env) or _ask("Passphrase", twice=True)
        if not passphrase:
            raise click.UsageError(
                "--encrypt needs a passphrase: run it on a terminal, or set "
                f"{passphrase_env or signing.PASSPHRASE_VARIABLE}"
            )
    elif passphrase_env is not None:
        raise click.UsageError("--passphrase-env goes with --encrypt")
    fingerprint = signing.keygen(run_path(private), run_path(public), passphrase)
    with Paper() as paper:
        if as_json:
            paper.json(
                {
                    "private_key": private,
                    "public_key": public,
                    "public_key_sha256": fingerprint,
                    "encrypted": passphrase is not None,
                }
            )
            return
        kept = "encrypted" if passphrase else "not encrypted: whoever reads the file can sign"
        paper.line(f"private key  {clean(private)} ({kept})")
        paper.line(f"public key   {clean(public)}")
        paper.line(f"fingerprint  {fingerprint}")


def _print_seal(paper: Paper, run: str, content: dict[str, Any], what: str) -> None:
    paper.line((f"{what} {clean(run)}", "bold"))
    paper.line(f"       {content['events']:,} events, at {content['created']}")
    paper.line(f"head   {content['diary_head']}")


def _asking(variable: str | None) -> Callable[[], str | None]:
    """Gives the passphrase when it turns out to be needed."""
    return lambda: _given_passphrase(variable) or _ask("Passphrase", twice=False)


def _given_passphrase(variable: str | None) -> str | None:
    if variable is None:
        return os.environ.get(signing.PASSPHRASE_VARIABLE)
    found = os.environ.get(variable)
    if not found:
        raise RecordKeyError(f"{variable} is not set: it should hold the passphrase")
    return found


def _ask(what: str, *, twice: bool) -> str | None:
    """Ask on the terminal; None where nobody can answer."""
    if sys.stdin is None or not sys.stdin.isatty():
        return None
    answer: str = click.prompt(
        what, hide_input=True, confirmation_prompt=twice, err=True, default="", show_default=False
    )
    return answer or None


def _words(command: str) -> str:
    if command.count("'") % 2 or command.count('"') % 2:
        raise click.UsageError("--key-command has a quote without its end")
    return command
