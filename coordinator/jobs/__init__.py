"""Jobs: simulation, pretraining, compression and export, started over the operator API and run in processes of their own."""
