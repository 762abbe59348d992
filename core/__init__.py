"""What an op is: signatures, argument checks, references, costs, config schemas, device facts, errors.

No backend and no plugin machinery lives here.
"""
