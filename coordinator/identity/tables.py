"""Tables of users, projects and their members, accounts at OpenID providers, sessions, access tokens, and the setup link.

Passwords are stored as Argon2id hashes, random secrets of 256 bits as SHA-256. No secret can be read back.
"""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, String, Table

from coordinator.db.tables import UTCDateTime, metadata

users = Table(
    "users",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("name", String(64), nullable=False, unique=True),
    Column("role", String(16), nullable=False),  # users.UserRole: in the whole coordinator
    Column("password_hash", String(200), nullable=False),  # Argon2id, PHC format; or NO_PASSWORD
    Column("created_at", UTCDateTime, nullable=False),
    Column("password_changed_at", UTCDateTime, nullable=False),
    Column("disabled_at", UTCDateTime, nullable=True),
)

projects = Table(
    "projects",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("created_at", UTCDateTime, nullable=False),
    Column("archived_at", UTCDateTime, nullable=True),
)

members = Table(
    "members",
    metadata,
    Column("project", String(63), ForeignKey("projects.name"), primary_key=True),
    Column("user", String(36), ForeignKey("users.id"), primary_key=True, index=True),
    Column("role", String(16), nullable=False),  # projects.MemberRole
)

sessions = Table(
    "sessions",
    metadata,
    Column("secret_sha256", String(64), primary_key=True),
    Column("user", String(36), ForeignKey("users.id"), nullable=False, index=True),
    Column("created_at", UTCDateTime, nullable=False),
    Column("last_used_at", UTCDateTime, nullable=False),  # within a minute
    Column("expires_at", UTCDateTime, nullable=False),  # however much it is used
)

access_tokens = Table(
    "access_tokens",
    metadata,
    Column("id", String(36), primary_key=True),
    Column("user", String(36), ForeignKey("users.id"), nullable=False, index=True),
    Column("name", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("secret_sha256", String(64), nullable=False, unique=True),
    Column("parent", String(36), ForeignKey("access_tokens.id"), nullable=True),  # the token that created it
    Column("created_at", UTCDateTime, nullable=False),
    Column("expires_at", UTCDateTime, nullable=False),
    Column("last_used_at", UTCDateTime, nullable=True),  # within a minute
    Column("revoked_at", UTCDateTime, nullable=True),
    Column("project", String(63), nullable=True),  # the only one that it may be used for; null: any
)

external_accounts = Table(
    "external_accounts",
    metadata,
    Column("issuer", String(500), primary_key=True),
    Column("subject", String(255), primary_key=True),  # of the issuer; ASCII, case-sensitive
    Column("user", String(36), ForeignKey("users.id"), nullable=False),
    Column("created_at", UTCDateTime, nullable=False),
)

setup_links = Table(
    "setup_links",
    metadata,
    Column("secret_sha256", String(64), primary_key=True),
    Column("created_at", UTCDateTime, nullable=False),
    Column("expires_at", UTCDateTime, nullable=False),
)
