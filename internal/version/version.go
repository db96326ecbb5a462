// Package version holds the version that the build stamps into every binary.
package version

// Version is set by the linker (-X); "dev" in a build without the Makefile.
var Version = "dev"
