"""`python -m opmux.cli`."""

from opmux.cli.main import main

raise SystemExit(main())
