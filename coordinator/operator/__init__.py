"""The operator's side of the API: client, following a run, registry transfers, offline signing."""
