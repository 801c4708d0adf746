"""Training on several hosts: starts and follows their processes, and goes on with the hosts that are left.

hostfile    which hosts there are, from a file or from Slurm
allocation  how many processes each of the hosts that answer runs
protocol    what the launcher and the members on the hosts say to each other
connection  a member, started through a remote shell
launcher    starts members, forms generations of them, replaces lost ones
member      runs torch's elastic agent on its host
"""
