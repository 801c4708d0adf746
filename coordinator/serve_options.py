"""The options of `fedloop serve` made into `Settings`: every value checked, every bad one reported at once."""

from __future__ import annotations

import re
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coordinator.errors import UserError
from coordinator.settings import Settings
from models import user_code


class Options(BaseModel):
    """What a person may say to `fedloop serve`; None: the default of `Settings`."""

    model_config = ConfigDict(extra="forbid")

    home: Path
    database_url: str | None = None
    operator: str = "127.0.0.1:8080"
    device: str = "127.0.0.1:8443"
    name: list[str] = []
    device_url: str | None = None
    ca_cert: Path | None = None
    ca_key: Path | None = None
    trusted_proxy: list[str] = []
    approve: bool = False
    certificate_days: Annotated[float, Field(ge=1 / 24, le=3650, allow_inf_nan=False)] = 30.0
    lease_seconds: Annotated[float, Field(ge=5, le=86_400, allow_inf_nan=False)] = 120.0
    checkins_per_second: Annotated[float, Field(ge=0.1, le=10_000, allow_inf_nan=False)] = 100.0
    held: Annotated[int, Field(ge=0, le=50_000)] = 1000
    data_dir: Path | None = None
    allow_path: list[Path] = []
    allow_code: list[str] = []
    no_sandbox: bool = False
    log_format: Literal["auto", "text", "json"] = "auto"
    insecure_operator: bool = False

    @field_validator("operator", "device")
    @classmethod
    def _address(cls, text: str) -> str:
        address(text)
        return text

    @field_validator("name")
    @classmethod
    def _names(cls, names: list[str]) -> list[str]:
        for name in names:
            if not _NAME.fullmatch(name) and not _is_address(name):
                raise ValueError(f"{name!r} is neither a host name nor an address")
        return names

    @field_validator("device_url")
    @classmethod
    def _device_url(cls, url: str | None) -> str | None:
        parts = urlsplit(url) if url is not None else None
        if parts is not None and (
            parts.scheme != "https" or not parts.hostname or parts.path not in ("", "/")
        ):
            raise ValueError("expected https://HOST:PORT, as devices reach the device API")
        return url

    @field_validator("trusted_proxy")
    @classmethod
    def _proxies(cls, proxies: list[str]) -> list[str]:
        for proxy in proxies:
            ip_network(proxy)
        return proxies

    @field_validator("data_dir", "ca_cert", "ca_key")
    @classmethod
    def _existing(cls, path: Path | None) -> Path | None:
        if path is not None and not path.exists():
            raise ValueError("there is no such file or folder")
        return path

    @field_validator("allow_path")
    @classmethod
    def _folders(cls, paths: list[Path]) -> list[Path]:
        for path in paths:
            if not path.is_dir():
                raise ValueError(f"{path}: there is no such folder")
        return paths

    @field_validator("allow_code")
    @classmethod
    def _references(cls, references: list[str]) -> list[str]:
        for reference in references:
            if not user_code.REFERENCE.fullmatch(reference):
                raise ValueError(f"{reference!r}: expected package.module:function")
        return references

    @model_validator(mode="after")
    def _together(self) -> Options:
        if (self.ca_cert is None) != (self.ca_key is None):
            raise ValueError("--ca-cert and --ca-key belong together: give both, or neither")
        host = address(self.operator)[0]
        if not self.insecure_operator and not _is_loopback(host):
            raise ValueError(
                f"--operator {self.operator}: the operator API speaks plain HTTP and would send the admin token over the "
                "network in clear; leave it on loopback and reach it through a tunnel or a TLS proxy, or say "
                "--insecure-operator"
            )
        return self


def read_settings(**given: Any) -> Settings:
    """The settings of these options, those that are None left to their defaults.

    Raises:
        UserError: listing every bad value.
    """
    try:
        options = Options.model_validate({key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        raise UserError("\n".join(_described(item) for item in error.errors())) from None
    operator, device = address(options.operator), address(options.device)
    names = tuple(dict.fromkeys(options.name)) or ("localhost", "127.0.0.1")
    if not options.name and device[0] not in (*names, "0.0.0.0", "::"):
        names = (*names, device[0])
    return Settings(
        home=options.home,
        database_url=options.database_url or f"sqlite:///{options.home / 'fedloop.db'}",
        operator_host=operator[0],
        operator_port=operator[1],
        device_host=device[0],
        device_port=device[1],
        names=names,
        device_url=(options.device_url or "").rstrip("/"),
        ca_certificate=options.ca_cert,
        ca_key=options.ca_key,
        trusted_proxies=tuple(options.trusted_proxy),
        needs_approval=options.approve,
        certificate_days=options.certificate_days,
        lease_seconds=options.lease_seconds,
        checkins_per_second=options.checkins_per_second,
        held=options.held,
        data_dir=options.data_dir.expanduser().absolute() if options.data_dir else None,
        allow_paths=tuple(path.absolute() for path in options.allow_path),
        allow_code=tuple(dict.fromkeys(options.allow_code)),
        no_sandbox=options.no_sandbox,
    )


def address(text: str) -> tuple[str, int]:
    """`"127.0.0.1:8080"` or `"[::1]:8080"` as host and port; port 0 lets the kernel choose.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:8080")
    return host, int(port)


def at_ports(settings: Settings, operator_port: int, device_port: int) -> Settings:
    """The settings with the ports that were had, and what devices are told to connect to where that was not said."""
    name = settings.names[0]
    host = f"[{name}]" if ":" in name else name
    return replace(
        settings,
        operator_port=operator_port,
        device_port=device_port,
        device_url=settings.device_url or f"https://{host}:{device_port}",
    )


_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_-]{1,63})*")


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return ip_address(host).is_loopback if _is_address(host) else host == "localhost"


def _described(item: Any) -> str:
    """One problem in our words, with the option's name."""
    message = item["msg"].removeprefix("Value error, ")
    if not item["loc"]:
        return str(message)
    option = "--" + str(item["loc"][0]).replace("_", "-")
    return f"{option} {item['input']}: {message[0].lower()}{message[1:]}"
