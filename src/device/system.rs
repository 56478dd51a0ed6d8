//! Differences between operating systems: paths of libOpenCL and of the cache, installation hints, memory size.

use std::ffi::OsString;
use std::path::PathBuf;

/// The operating system, as [`std::env::consts::OS`] names it.
pub(crate) const OS: &str = std::env::consts::OS;

/// Returns the names of Android's OpenCL library, given the name of the folders for libraries. An app can load a vendor's library by
/// name if the app's manifest asks for it; Mali's may be part of the OpenGL library.
macro_rules! android_libraries {
    ($lib:literal) => {
        &[
            "libOpenCL.so",
            concat!("/vendor/", $lib, "/libOpenCL.so"),
            concat!("/system/vendor/", $lib, "/libOpenCL.so"),
            concat!("/system/", $lib, "/libOpenCL.so"),
            concat!("/vendor/", $lib, "/libPVROCL.so"),
            "libGLES_mali.so",
            concat!("/vendor/", $lib, "/egl/libGLES_mali.so"),
            concat!("/system/vendor/", $lib, "/egl/libGLES_mali.so"),
        ]
    };
}

/// Returns the names of the OpenCL library, in the order in which they are tried.
pub(crate) fn opencl_libraries(os: &str) -> &'static [&'static str] {
    match os {
        "windows" => &["OpenCL.dll"],
        "macos" => &["/System/Library/Frameworks/OpenCL.framework/OpenCL"],
        "android" if cfg!(target_pointer_width = "32") => android_libraries!("lib"),
        "android" => android_libraries!("lib64"),
        _ => &["libOpenCL.so.1", "libOpenCL.so"],
    }
}

/// Returns a hint on how to install a driver.
pub(crate) fn install_hint(os: &str) -> &'static str {
    match os {
        "windows" => {
            "install your GPU vendor's driver, which brings OpenCL.dll, or for the processor Intel's CPU Runtime for OpenCL"
        }
        "macos" => "macOS has a driver for its GPUs; for the processor install PoCL: `brew install pocl`",
        "android" => {
            "OpenCL comes with the device, if at all: an app declares <uses-native-library android:name=\"libOpenCL.so\" \
             android:required=\"false\"/> in its manifest to see it"
        }
        _ => {
            "install your GPU vendor's driver, or for the processor PoCL (on Debian and Ubuntu: `apt-get install \
             pocl-opencl-icd ocl-icd-libopencl1`)"
        }
    }
}

/// Returns a phrase for error messages that says where the OpenCL library looks for drivers.
pub(crate) fn driver_registry(os: &str) -> &'static str {
    match os {
        "windows" => "looked in the registry, HKEY_LOCAL_MACHINE\\SOFTWARE\\Khronos\\OpenCL\\Vendors",
        "macos" | "android" => "the library is the driver's own",
        _ => "looked in /etc/OpenCL/vendors (OCL_ICD_VENDORS overrides)",
    }
}

/// Returns the user's folder for caches. A variable that is not an absolute path counts as unset, as the XDG specification
/// requires.
pub(crate) fn cache_folder(os: &str, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let own = || match os {
        "windows" => absolute("LOCALAPPDATA"),
        "macos" => Some(absolute("HOME")?.join("Library").join("Caches")),
        _ => Some(absolute("HOME")?.join(".cache")),
    };
    absolute("XDG_CACHE_HOME").or_else(own)
}

/// Returns the size of the host's memory in bytes; `None` if unknown.
pub(crate) fn total_memory() -> Option<u64> {
    #[cfg(any(windows, target_os = "macos"))]
    {
        let refreshed = sysinfo::RefreshKind::nothing().with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram());
        Some(sysinfo::System::new_with_specifics(refreshed).total_memory()).filter(|&bytes| bytes > 0)
    }
    #[cfg(not(any(windows, target_os = "macos")))]
    {
        let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
        let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [&str; 5] = ["linux", "windows", "macos", "android", "freebsd"];

    #[test]
    fn every_system_has_a_library_and_an_install_hint() {
        let first = ALL.map(|os| opencl_libraries(os)[0]);
        let framework = "/System/Library/Frameworks/OpenCL.framework/OpenCL";
        assert_eq!(first, ["libOpenCL.so.1", "OpenCL.dll", framework, "libOpenCL.so", "libOpenCL.so.1"]);
        assert!(opencl_libraries("android").iter().any(|path| path.starts_with("/vendor/lib")));
        assert!(opencl_libraries("android").iter().any(|path| path.contains("mali")));
        for os in ALL {
            let hint = install_hint(os);
            assert_eq!(hint.contains("apt-get"), ["linux", "freebsd"].contains(&os), "{os}: {hint}");
            assert_eq!(driver_registry(os).contains("/etc/OpenCL"), ["linux", "freebsd"].contains(&os), "{os}");
        }
    }

    #[test]
    fn every_system_has_a_cache_folder() {
        let set = |pairs: &'static [(&str, &str)]| {
            move |name: &str| pairs.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        };
        let home = set(&[("HOME", "/home/u"), ("LOCALAPPDATA", "/local")]);
        let folders = ALL.map(|os| cache_folder(os, &home).unwrap());
        let (cache, caches) = ("/home/u/.cache", "/home/u/Library/Caches");
        assert_eq!(folders, [cache, "/local", caches, cache, cache].map(PathBuf::from));
        for os in ALL {
            let chosen =
                cache_folder(os, set(&[("HOME", "/home/u"), ("LOCALAPPDATA", "/l"), ("XDG_CACHE_HOME", "/x")]));
            assert_eq!(chosen, Some(PathBuf::from("/x")), "{os}");
            assert_eq!(cache_folder(os, set(&[("HOME", "here"), ("LOCALAPPDATA", "here")])), None, "{os}");
            assert_eq!(cache_folder(os, set(&[])), None, "{os}");
        }
    }

    #[test]
    fn the_host_has_memory() {
        assert!(total_memory().is_some_and(|bytes| bytes > 1 << 28));
    }
}
