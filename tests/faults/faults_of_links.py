"""Faults of names: keys that lead nowhere, round in circles, or out of the file."""

import os

import h5py
import numpy as np
from matrix_case import GZIP, REFUSED, RIGHT, ROWS, WIDTH, fault, values_of

TABLE = np.dtype([("a", "i4"), ("b", "f4", 3)])


def linked(name, expected, inside, *, key="x", x_key=None, **options):
    """Registers what lies under the name ``x``, or under another key."""

    def write(case):
        case.write(name="foreign.h5")
        case.write(inside=lambda file: inside(file, case))
        case.x_key = x_key or key

    write.__name__ = name
    fault(expected, key=key if expected == REFUSED else None, **options)(write)


def foreign(case):
    return case.at("foreign.h5")


def plain(file, case):
    file["x"] = values_of()


def put(link):
    """What puts a link where ``x`` should be."""
    return lambda file, case: file.__setitem__("x", link(case))


def group(file, case):
    file["x/inner"] = values_of()


def parent_elsewhere(file, case):
    file["group"] = h5py.ExternalLink("foreign.h5", "/")


def soft_into_a_foreign_group(file, case):
    parent_elsewhere(file, case)
    file["x"] = h5py.SoftLink("/group/x")


def outside(place):
    """What stores the rows in another file."""

    def inside(file, case):
        where = foreign(case) if place == "absolute" else os.path.relpath(foreign(case))
        file.create_dataset("x", (ROWS, WIDTH), "i4", external=[(where, 2048, h5py.h5f.UNLIMITED)])

    return inside


def passwords(file, case):
    file.create_dataset("x", (ROWS, 4), "u1", external=[("/etc/passwd", 0, ROWS * 4)])


def virtual(name, array="x"):
    """What makes ``x`` of rows in another file."""

    def inside(file, case):
        layout = h5py.VirtualLayout((ROWS, WIDTH), "i4")
        layout[:] = h5py.VirtualSource(name, array, (ROWS, WIDTH))
        file.create_virtual_dataset("x", layout)

    return inside


def virtual_over_virtual(file, case):
    virtual("foreign.h5")(file, case)
    file.move("x", "between")
    layout = h5py.VirtualLayout((ROWS, WIDTH), "i4")
    layout[:] = h5py.VirtualSource(".", "between", (ROWS, WIDTH))
    file.create_virtual_dataset("x", layout)


def soft_loop(file, case):
    file["x"], file["other"] = h5py.SoftLink("/other"), h5py.SoftLink("/x")


def long_chain(file, case):
    file["0"] = values_of()
    for n in range(20):
        file[str(n + 1)] = h5py.SoftLink(f"/{n}")
    file["x"] = h5py.SoftLink("/20")


def soft(file, case):
    file["deep/inner"] = values_of()
    file["deep/middle"] = h5py.SoftLink("inner")
    file["x"] = h5py.SoftLink("/deep/middle")


def cycle(file, case):
    file["x"] = values_of()
    file["group/back"] = file["/"]
    file["group/x"] = file["x"]


def table(file, case):
    rows = np.zeros(ROWS, TABLE)
    rows["a"] = case.truth["y"]
    file["table"] = rows
    case.truth["x"] = rows["a"].copy()


def names_that_are_no_text(file, case):
    h5py.h5g.create(file.id, b"\xff\xfe")
    file["x"] = values_of()


linked("missing_key", REFUSED, plain, key="z")
linked("missing_key_in_a_group", REFUSED, group, key="x/outer", slow=True)
linked("array_taken_for_a_group", REFUSED, plain, key="x/inner")
linked("group_taken_for_an_array", REFUSED, group)
linked("key_that_climbs_out", REFUSED, plain, key="../foreign.h5/x")
linked("member_that_a_table_lacks", REFUSED, table, key="table/c")
linked("member_of_a_table", RIGHT, table, x_key="table/a")
linked("external_link_by_absolute_path", REFUSED, put(lambda case: h5py.ExternalLink(foreign(case), "/x")))
linked("external_link_by_relative_path", REFUSED, put(lambda case: h5py.ExternalLink("foreign.h5", "/x")), slow=True)
linked("external_link_to_a_group_above", REFUSED, parent_elsewhere, key="group/x")
linked("soft_link_through_an_external_one", REFUSED, soft_into_a_foreign_group)
linked("external_link_to_a_missing_file", REFUSED, put(lambda case: h5py.ExternalLink("gone.h5", "/x")), slow=True)
linked(
    "external_link_to_a_missing_file_that_is_allowed",
    REFUSED,
    put(lambda case: h5py.ExternalLink("gone.h5", "/x")),
    files={"allow_external": True},
)
linked(
    "external_link_to_itself",
    REFUSED,
    put(lambda case: h5py.ExternalLink(case.path, "/x")),
    files={"allow_external": True},
    slow=True,
)
linked("external_link_that_is_allowed", RIGHT, put(lambda case: h5py.ExternalLink(foreign(case), "/x")),
       files={"allow_external": True})  # fmt: skip
linked("rows_outside_by_absolute_path", REFUSED, outside("absolute"))
linked("rows_outside_by_relative_path", REFUSED, outside("relative"))
linked("rows_in_the_list_of_users", REFUSED, passwords, slow=True)
linked("virtual_array_over_another_file", REFUSED, virtual("foreign.h5"))
linked(
    "virtual_array_over_another_file_that_is_allowed",
    RIGHT,
    virtual("foreign.h5"),
    files={"allow_external": True},
    slow=True,
)
linked("virtual_array_over_a_missing_file", REFUSED, virtual("gone.h5"), slow=True)
linked("virtual_array_over_a_missing_file_that_is_allowed", REFUSED, virtual("gone.h5"), files={"allow_external": True})
linked("virtual_array_over_a_missing_array", REFUSED, virtual(".", "gone"))
linked(
    "virtual_array_over_a_missing_array_elsewhere",
    REFUSED,
    virtual("foreign.h5", "gone"),
    files={"allow_external": True},
)
linked("virtual_array_over_one_that_leaves_the_file", REFUSED, virtual_over_virtual)
linked("virtual_array_over_itself", REFUSED, virtual(".", "x"))
linked("soft_link_loop", REFUSED, soft_loop)
linked("soft_link_to_itself", REFUSED, put(lambda case: h5py.SoftLink("/x")), slow=True)
linked("soft_links_without_number", REFUSED, long_chain, slow=True)
linked("dangling_soft_link", REFUSED, put(lambda case: h5py.SoftLink("/gone")))
linked("soft_links_inside_the_file", RIGHT, soft)
linked("hard_link_cycle", RIGHT, cycle, x_key="group/back/group/x")
linked("names_that_are_no_text", RIGHT, names_that_are_no_text, slow=True)


@fault(RIGHT, slow=True)
def a_key_with_too_many_slashes(case):
    case.write(**GZIP)
    case.x_key = "//x"
