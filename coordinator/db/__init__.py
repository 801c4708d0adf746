"""The coordinator's database: tables, queries and its single writer."""
