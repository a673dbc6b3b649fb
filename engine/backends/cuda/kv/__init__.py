"""The KV store on a GPU: pools of records, tables of spans, and the launches that fill them."""
