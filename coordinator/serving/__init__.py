"""The front of inference serving: protocols, queues, supervision of workers.

It imports no framework.
"""
