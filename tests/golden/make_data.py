"""Writes rows to data/rows.jsonl and the same rows as Parquet, by pyarrow, as other programs write it.

    python make_data.py

snappy.parquet is what pyarrow and the Hugging Face hub make by default; zstd.parquet has no dictionaries, two row groups and
the older data pages; large.parquet has Arrow's large strings, as pandas and Polars like them.
The files here were made with pyarrow==26.0.1.
"""

import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq

OUT = pathlib.Path(__file__).parent / "data"


def rows():
    for n in range(7):
        yield {
            "prompt": [{"role": "user", "content": f"question {n}, “{'x' * n}”"}] if n != 3 else [],
            "text": None if n == 2 else f"line {n}\n",
            "input_ids": None if n == 4 else list(range(n)),
            "count": n * 10**12,
            "score": n / 3,
            "kind": ["short", "long"][n % 2],
            "ok": n % 3 == 0,
            "nested": {"a": n, "b": [str(n)] * 2},
        }


def schema(string):
    message = pa.struct([("role", string), ("content", string)])
    return pa.schema(
        [
            ("prompt", pa.list_(message)),
            ("text", string),
            ("input_ids", pa.list_(pa.int32())),
            ("count", pa.int64()),
            ("score", pa.float64()),
            ("kind", string),
            ("ok", pa.bool_()),
            ("nested", pa.struct([("a", pa.int8()), ("b", pa.list_(string))])),
        ]
    )


def main():
    OUT.mkdir(exist_ok=True)
    with open(OUT / "rows.jsonl", "w", encoding="utf-8") as file:
        for row in rows():
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    table = pa.Table.from_pylist(list(rows()), schema(pa.string()))
    pq.write_table(table, OUT / "snappy.parquet")
    pq.write_table(
        table, OUT / "zstd.parquet", compression="zstd", use_dictionary=False, row_group_size=4, data_page_version="1.0"
    )
    large = pa.Table.from_pylist(list(rows()), schema(pa.large_string()))
    pq.write_table(large, OUT / "large.parquet", compression="none", data_page_version="2.0")


if __name__ == "__main__":
    main()
