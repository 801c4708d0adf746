"""A parameter server: servers keep the params, workers send gradients and get params back (Li 2014).

    worker: gradient of its share of a batch -> push to every server -> params to go on with
    server: enough gradients? -> mean -> one optimizer step -> replicas have it too -> answer those who may go on

`python -P -m models.pretrain.server JOB.json` starts all processes of a job on this machine; the job file has a table
`server` (see `settings`), and else what `models.pretrain.worker` takes. `rules` decide which gradients make an update
and who waits, `shard` keeps params, `replica` answers workers and hands updates on to its backups, `client` is the
worker's side, which goes on with a backup where a server dies.

Processes talk by torch.distributed.rpc, which pickles: one trusted cluster only. It is bound to the loopback
interface unless GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME name another.
"""
