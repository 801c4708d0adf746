"""A parameter server: servers keep the params, workers push gradients and pull params (Li 2014).

    worker: gradient of its share of a batch -> push to every server -> new params
    server: enough gradients? -> mean -> one optimizer step -> replicate -> answer the workers that may continue

`python -P -m models.pretrain.parameter_server JOB.json` starts all processes of a job on this machine. The job file has
a table `server` (see `settings`), and otherwise what `models.pretrain.training_process` reads. `rules` decide which gradients make
an update and who waits, `shard` keeps params, `replica` answers workers and passes updates on to its backups, `client`
is the worker's side, which fails over to a backup when a server dies.

Processes communicate by torch.distributed.rpc, which pickles: use it within one trusted cluster only. It is bound to the
loopback interface unless GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME name another.
"""
