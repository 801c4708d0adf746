"""The coordinator's database: tables, queries, migrations, and the one writer."""
