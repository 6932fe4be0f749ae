from django.contrib import admin
from django.urls import include, path

urlpatterns = [
    path("", include("example_project.newsletter.urls")),
    path("admin/", admin.site.urls),
]
