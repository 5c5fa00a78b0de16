"""Key -> whole row: layout, options, verbs, views, state dicts, files, modules, over an engine of rows."""
