package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// sbomOf is the bill of materials of a package: its programs, and the modules that the linker has recorded in them. It
// has no serial number, which would be another one each time. cyclonedx-gomod makes a bill of one program from the same
// record; it would be another 60 modules.
func (r *release) sbomOf(name string, programs []string) ([]byte, error) {
	bom := cdx.NewBOM()
	self := cdx.Component{BOMRef: name, Type: cdx.ComponentTypeApplication, Name: name, Version: r.version,
		Licenses: &cdx.Licenses{{License: &cdx.License{ID: "Apache-2.0"}}}}
	bom.Metadata = &cdx.Metadata{Timestamp: r.time.Format(time.RFC3339), Component: &self}
	bill := &bill{release: r, seen: map[string]bool{}}
	contains := []string{}
	for _, p := range programs {
		ref, err := bill.add(p)
		if err != nil {
			return nil, err
		}
		contains = append(contains, ref)
	}
	bill.dependencies = append(bill.dependencies, cdx.Dependency{Ref: name, Dependencies: &contains})
	slices.SortFunc(bill.components, func(a, b cdx.Component) int { return strings.Compare(a.BOMRef, b.BOMRef) })
	bom.Components, bom.Dependencies = &bill.components, &bill.dependencies
	var out bytes.Buffer
	enc := cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON)
	enc.SetPretty(true)
	err := enc.EncodeVersion(bom, cdx.SpecVersion1_6)
	return out.Bytes(), err
}

type bill struct {
	*release
	components   []cdx.Component
	dependencies []cdx.Dependency
	seen         map[string]bool // modules, by reference
}

// add adds a program and its modules, and returns its reference.
func (b *bill) add(path string) (string, error) {
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("%s: %w", path, err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	c := cdx.Component{Type: cdx.ComponentTypeApplication, Name: filepath.Base(path), Version: b.version,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: fmt.Sprintf("%x", sha256.Sum256(data))}}}
	c.BOMRef = c.Name + "@" + c.Version
	b.components = append(b.components, c)
	modules := []string{b.module("std", strings.TrimPrefix(info.GoVersion, "go"))}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		modules = append(modules, b.module(m.Path, m.Version))
	}
	b.dependencies = append(b.dependencies, cdx.Dependency{Ref: c.BOMRef, Dependencies: &modules})
	return c.BOMRef, nil
}

// module adds one that is new, and returns its reference, which is its package URL.
func (b *bill) module(path, version string) string {
	url := "pkg:golang/" + path + "@" + version
	if !b.seen[url] {
		b.seen[url] = true
		b.components = append(b.components, cdx.Component{BOMRef: url, Type: cdx.ComponentTypeLibrary, Name: path,
			Version: version, PackageURL: url})
	}
	return url
}
