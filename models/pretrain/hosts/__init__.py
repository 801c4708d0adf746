"""Training on several hosts: read the hosts file, start a member on each host, train with those that answer.

hostfile    which hosts there are, from a file or from Slurm
allocation  how many processes each of the hosts that answer runs
connection  a member: a process on a host, started through a remote shell, that talks in lines
launcher    starts members, forms generations of them, replaces lost ones
member      the process on each host; it runs torch's elastic agent
"""
