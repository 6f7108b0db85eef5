#!/usr/bin/env bash
# Build the static libjpeg-turbo that wheels contain: tools/build_libjpeg.sh SOURCES FOLDER
#
# SOURCES is an unpacked release of libjpeg-turbo. FOLDER gets lib/libjpeg.a, which may become part of a shared library,
# include/*.h, and its licence. Needs a C compiler, CMake, and on x86-64 NASM, for the vector instructions.
set -euo pipefail
sources=$1 folder=$2
build=$(mktemp -d)
cmake -S "$sources" -B "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DENABLE_SHARED=OFF \
  -DWITH_TURBOJPEG=OFF -DREQUIRE_SIMD=ON
cmake --build "$build" --target jpeg-static --parallel
mkdir -p "$folder/lib" "$folder/include"
cp "$build/libjpeg.a" "$folder/lib"
cp "$sources"/{jpeglib,jmorecfg,jerror}.h "$build/jconfig.h" "$folder/include"
cp "$sources/LICENSE.md" "$folder"
rm -r "$build"
